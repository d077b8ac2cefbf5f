"""CUDA graphs that `compile` records where they pay, beside eager modules on the same device."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import thunder_fn as tfn
from thunder_fn import executors
from thunder_fn.errors import RegionWarning
from thunder_fn.executors import cudagraphs
from thunder_fn.ir.trace import Equation
from thunder_fn.recipes import Recipe, captured


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of results whenever a recording is replayed."""
    found, call = list[int](), cudagraphs.Graph.__call__

    def counting(self: Any, inputs: Any) -> Any:
        found.append(len(self.results))
        return call(self, inputs)

    monkeypatch.setattr(cudagraphs.Graph, "__call__", counting)
    return found


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.BatchNorm1d(8)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 4)).cuda()


def plain(run: Any, xs: list[Tensor], _: Any) -> Tensor:
    return run(xs[0]).square().mean()


def of_two_batches(run: Any, xs: list[Tensor], _: Any) -> Tensor:
    """The second forward finds what the first one lent still needed."""
    first, second = (run(x).square().mean() for x in xs)
    return first + second


def accumulated(run: Any, xs: list[Tensor], backward: Callable[[Tensor], None]) -> Tensor:
    first = run(xs[0]).square().mean()
    backward(first)
    return run(xs[1]).square().mean() + first.detach()


WAYS = {"plain": plain, "two batches": of_two_batches, "accumulated": accumulated}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("way", WAYS)
def test_training_steps_are_eagers(way: str, dropout: float, replays: list[int]) -> None:
    """Losses, gradients, statistics and the generator, in every step; results stay the caller's."""

    def trained(transform: Callable[[Any], Any]) -> list[Tensor]:
        module = model(dropout)
        run, optimizer, kept = transform(module), torch.optim.SGD(module.parameters(), lr=0.1), list[Tensor]()
        for step in range(7):
            xs = [torch.randn(5, 8, generator=torch.Generator().manual_seed(step + k)).cuda() for k in (0, 50)]
            loss = WAYS[way](run, xs, lambda value: value.backward())
            loss.backward(retain_graph=step == 5)
            optimizer.step()
            kept += [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]
            optimizer.zero_grad()
            executors.wait()
        return [*kept, *module.buffers(), torch.cuda.get_rng_state()]

    torch.manual_seed(3)
    mine = trained(lambda module: tfn.compile(module, executors=[]))
    torch.manual_seed(3)
    for found, wanted in zip(mine, trained(lambda module: module), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
    assert len(replays) >= 4


def test_each_size_that_comes_often_has_its_recording(replays: list[int]) -> None:
    """Of a program of symbolic sizes: forward and backward, with losses, gradients and statistics of eager."""

    def trained(transform: Callable[[Any], Any]) -> list[Tensor]:
        module = model(dropout=0.5)
        run, optimizer, losses = transform(module), torch.optim.SGD(module.parameters(), lr=0.1), list[Tensor]()
        for step, size in enumerate((5, 7, 6) * 5):
            x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step)).cuda()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            losses += [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]
            optimizer.zero_grad()
        return [*losses, *module.buffers(), torch.cuda.get_rng_state()]

    torch.manual_seed(3)
    mine = trained(lambda module: tfn.jit(module, executors=[captured.GRAPHS]))
    torch.manual_seed(3)
    for found, wanted in zip(mine, trained(lambda module: module), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
    assert len(replays) >= 12


def test_explain_says_so() -> None:
    assert "cudagraphs (bitwise, what launches take the time of)" in Recipe().explain(model())


@pytest.mark.parametrize("case", ["large", "few launches", "asks for values", "copies from the CPU"])
def test_where_they_do_not_pay_nothing_is_recorded(case: str, replays: list[int]) -> None:
    f: dict[str, Callable[[Tensor], Tensor]] = {
        "large": lambda x: sum((x @ x * k for k in range(8)), x),
        "few launches": lambda x: x.sin().cos(),
        "asks for values": lambda x: sum((x[x > 0].sum() * k for k in range(9)), x),
        "copies from the CPU": lambda x: sum((x.sin() * k for k in range(9)), x)[torch.tensor([0, 1])],
    }
    x = torch.randn((1024, 1024) if case == "large" else (4, 4), device="cuda")
    run = tfn.compile(f[case], executors=["torch"]) if case == "large" else tfn.compile(f[case])
    for _ in range(5):
        torch.testing.assert_close(run(x), f[case](x), rtol=1e-3, atol=1e-2)
    assert not replays


def test_a_recording_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the line; numbers, and those drawn afterwards, are eager's."""
    never: Callable[[Equation], bool] = lambda equation: False
    monkeypatch.setattr(captured, "waits", never)
    f = lambda x: sum((torch.nn.functional.dropout(x) * k for k in range(9)), x.masked_fill(x > 0, x.sum()))
    x = torch.randn(4, 4, device="cuda")
    run = tfn.jit(f, executors=[captured.GRAPHS])
    torch.manual_seed(0)
    with pytest.warns(RegionWarning) as said:
        found = [*(run(x) for _ in range(5)), torch.randn(3, device="cuda")]
    torch.manual_seed(0)
    for mine in found:
        torch.testing.assert_close(mine, f(x) if mine.dim() == 2 else torch.randn(3, device="cuda"))
    assert len(said) == 1 and "a program cannot be recorded and runs as it is: AcceleratorError" in str(said[0].message)
    (reason,) = tfn.explain_claims(run, x).left_out
    assert reason[1].startswith("no graph is recorded: AcceleratorError: CUDA error: operation not permitted")


@pytest.mark.valueless
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_ops_that_wait_for_the_gpu_are_known(part: int) -> None:
    """Of PyTorch's operators: a program of leaves that are not known to wait does not."""
    unknown = list[str]()
    for op in op_db[part::8]:
        if torch.float32 in op.supported_dtypes("cuda") and op.name != "sparse.mm":  # a layout of its own
            for sample in itertools.islice(op.sample_inputs("cuda", torch.float32), 2):
                call = lambda x, op=op, sample=sample: op(x, *sample.args, **sample.kwargs)
                if waits(call, sample.input) and not is_known_to_wait(call, sample.input):
                    unknown.append(f"{op.name} {sample.summary()}")
    assert not unknown


def waits(call: Callable[..., Any], *args: Any) -> bool:
    """Test whether eager PyTorch waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*args)
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)  # PyTorch has kernels in Triton, whose interpreter waits
        return "synchroniz" in str(error) and not any("triton/runtime" in one.filename for one in frames)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def is_known_to_wait(call: Callable[..., Any], x: Any) -> bool:
    """Test whether a leaf of the trace is known to wait, or its leaves do not: eager copied numbers from the CPU."""
    try:
        found = tfn.trace(call, x)
    except tfn.errors.CaptureError:  # it asks for values
        return True
    tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    known = any(map(captured.unrecordable, (equation for equation, _ in captured.leaves(found))))
    return known or not waits(tfn.evaluate, found, tensors)


def test_seeds_of_attention_stay_in_a_recording(replays: list[int]) -> None:
    """PyTorch's backward reads them on the CPU: a forward that gives them away is not recorded."""
    q = torch.randn(1, 2, 16, 8, device="cuda", requires_grad=True)
    drop = lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sin().sum()
    run = tfn.jit(drop, executors=["cudagraphs"])
    refused = pytest.warns(tfn.errors.RegionWarning, match="an attention's dropout in it shares its seeds")
    with refused:
        for _ in range(3):
            run(q).backward()
    whole = tfn.jit(tfn.grad(drop), executors=["cudagraphs"])
    torch.manual_seed(0)
    found = [whole(q.detach()) for _ in range(3)]
    torch.manual_seed(0)
    for mine in found:
        (wanted,) = torch.autograd.grad(drop(q), q)
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("op", ["clamp", "stack", "logaddexp"])
@pytest.mark.parametrize("executor", ["inductor", "cudagraphs", "torch"])
def test_numbers_of_the_cpu_are_refused_where_eager_refuses_them(op: str, executor: str) -> None:
    f: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "clamp": lambda x, n: x.clamp(min=n) * 2 + 1,
        "stack": lambda x, n: torch.stack([x.sum(), n]) * 2 + 1,
        "logaddexp": lambda x, n: torch.logaddexp(x, n) * 2 + 1,
    }
    x, number = torch.randn(3, device="cuda"), torch.zeros(())
    for run in (f[op], tfn.jit(f[op], executors=[executor])):
        with pytest.raises(RuntimeError, match=r"(?i)expected all tensors to be on the same device"):
            run(x, number)
