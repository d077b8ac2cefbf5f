"""The executors that come with thunder_fn: sdpa, triton, cudagraphs; numerics labels and verify."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.torch_version import TorchVersion

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import grad, jit, torch_internals as internals
from thunder_fn.errors import ExecutorError, JitError, RegionWarning, VerificationError
from thunder_fn.executors import FusionExecutor, backend, get_executor, list_executors
from thunder_fn.executors.cudagraphs import MAX_MOVES, CudaGraphs
from thunder_fn.executors.sdpa import BACKENDS, choose_kernel
from thunder_fn.extend import OperatorExecutor
from thunder_fn.extend.regions import Memory


def program(f: Callable[..., Any]) -> str:
    return str(tfn.last_traces(f)[-1])


def test_all_are_there_by_name() -> None:
    assert {"torch", "inductor", "sdpa", "triton", "cudagraphs"} <= set(list_executors())
    for name in ("sdpa", "triton", "cudagraphs"):
        assert get_executor(name).name == name


# ---- triton ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(reduction: str, dtype: torch.dtype) -> None:
    logits, labels = torch.randn(6, 11).to(dtype), torch.tensor([0, 10, -100, 3, 3, 1])
    f = lambda x, y: F.cross_entropy(x, y, reduction=reduction)
    total = lambda x, y: (f(x, y) * 3).sum()
    fast, g = jit(f, executors=["triton"]), grad(jit(total, executors=["triton"]))
    near = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    close = lambda found, wanted: torch.testing.assert_close(found, wanted, **near)
    close(fast(logits, labels), f(logits, labels))
    close(g(logits, labels), torch.func.grad(total)(logits, labels))
    assert program(fast).count("= triton_cross_entropy(") == 1
    assert program(g).count("= triton_cross_entropy_backward(") == 1
    x = logits.clone().requires_grad_()
    jit(total, executors=["triton"])(x, labels).backward()
    close(x.grad, torch.func.grad(total)(logits, labels))


@pytest.mark.filterwarnings("ignore:.*takes nothing of:thunder_fn.errors.RegionWarning")
def test_cross_entropy_is_left_where_the_kernel_would_be_wrong() -> None:
    logits, labels = torch.randn(6, 11), torch.randint(0, 11, (6,))
    for options in ({"label_smoothing": 0.1}, {"weight": torch.rand(11)}):
        f = jit(lambda x, y, options=options: F.cross_entropy(x, y, **options), executors=["triton"])
        torch.testing.assert_close(f(logits, labels), F.cross_entropy(logits, labels, **options))
        assert "triton" not in program(f)
    double = jit(lambda x, y: F.cross_entropy(x, y), executors=["triton"])
    torch.testing.assert_close(double(logits.double(), labels), F.cross_entropy(logits.double(), labels))
    assert "triton" not in program(double)


def test_an_executor_that_takes_nothing_says_why() -> None:
    """Once for a program, if there was something to take: nothing is slow without a word."""
    x = torch.randn(4, dtype=torch.complex64)
    with pytest.warns(RegionWarning, match="^inductor: takes nothing of f, ") as said:

        def f(x: Tensor) -> Tensor:
            return (x * 2).exp() + x

        run = jit(f, executors=["inductor"])
        run(x), run(x)
    assert len(said) == 1 and "aten.mul.Tensor: Inductor does not compile complex numbers" in str(said[0].message)
    jit(lambda x: x * 2, executors=["inductor"])(x)  # nothing to fuse


@pytest.mark.parametrize("says", ["needs compute capability 9.0", False, None])
def test_an_executor_of_operators_that_takes_nothing_says_why(says: str | bool | None) -> None:
    """Once: the reason of its checker, that this said no, or that nothing is registered."""
    mine = OperatorExecutor("mine")
    sine = mine.register_operator("sine", like=torch.sin, fn=torch.sin)
    mine.register_implementation(torch.tan if says is None else torch.sin, sine, checker=lambda x: says)
    run = jit(lambda x: x.sin().cos(), executors=[mine])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(x := torch.ones(2)), run(x)
        jit(lambda x: x.view(2), executors=[mine])(x), jit(lambda x: x[:0].sin(), executors=[mine])(x)  # no work
    reasons = {None: "nothing is registered for aten.sin.default, aten.cos.default"}
    reason = reasons.get(says, f"aten.sin.default: {says or 'the checker <lambda> said no'}")
    wanted = [f"mine: takes nothing of program, and others run it:\n  {reason}"]
    assert [str(one.message).partition("\nfrom: ")[0] for one in said] == wanted
    assert says is None or (says or "the checker <lambda> said no") in str(tfn.explain_claims(run, x))


@pytest.mark.filterwarnings("error")
def test_executors_of_operators_that_others_relieve_say_nothing() -> None:
    never, always = OperatorExecutor("never"), OperatorExecutor("always")
    for executor, answer in ((never, False), (always, True)):
        sine = executor.register_operator("sine", like=torch.sin, fn=torch.sin)
        executor.register_implementation(torch.sin, sine, checker=lambda x, answer=answer: answer)
    jit(torch.sin, executors=[never, always])(torch.ones(2))
    derived = OperatorExecutor("derived")
    derived.register_implementation(torch.sin, grad_transform=lambda x: x.sin())
    jit(torch.sin, executors=[derived])(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*takes nothing of:thunder_fn.errors.RegionWarning")
def test_rms_norm() -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(8)
    f = lambda x, w: F.rms_norm(x, (8,), w, 1e-5).sin().sum()
    fast = jit(f, executors=["triton"])
    torch.testing.assert_close(fast(x, w), f(x, w))
    g = grad(fast, argnums=(0, 1))
    for found, wanted in zip(g(x, w), torch.func.grad(f, (0, 1))(x, w), strict=True):
        torch.testing.assert_close(found, wanted)
    assert program(fast).count("= triton_rms_norm(") == 1
    assert program(g).count("= triton_rms_norm(") == program(g).count("= triton_rms_norm_backward(") == 1
    torch.testing.assert_close(
        tfn.vmap(grad(fast), in_dims=(0, None))(x, w), torch.func.vmap(torch.func.grad(f), (0, None))(x, w)
    )
    module = torch.nn.RMSNorm(8)
    torch.testing.assert_close(jit(module, executors=["triton"])(x), module(x))


KERNELS = """
import torch
from thunder_fn.executors.triton import kernels, operators as meaning

torch.manual_seed(0)
for columns in (7, 1024, 2500):  # less than a block, one, several
    x, y = torch.randn(5, columns), torch.randint(0, columns, (5,))
    x[1, : columns - 2], y[1], y[2] = float("-inf"), columns - 1, -100
    found, wanted = kernels.cross_entropy_forward(x, y, -100), meaning.cross_entropy_like(x, y, -100)
    torch.testing.assert_close(found, wanted)
    g, lse = torch.randn(5), wanted[1]
    back = kernels.cross_entropy_backward(g, x, y, lse, -100)
    torch.testing.assert_close(back, meaning.cross_entropy_backward_like(g, x, y, lse, -100))
    x, w, g = torch.randn(5, columns), torch.randn(columns), torch.randn(5, columns)
    found, wanted = kernels.rms_norm_forward(x, w, 1e-5), meaning.rms_norm_like(x, w, 1e-5)
    torch.testing.assert_close(found, wanted)
    back = kernels.rms_norm_backward(g, x, w, wanted[1])
    torch.testing.assert_close(back, meaning.rms_norm_backward_like(g, x, w, wanted[1]))
"""

ATTENTION = """
import torch
from thunder_fn.derived.quirks import attention_orders as orders
from thunder_fn.executors.triton import attention as kernels

torch.manual_seed(0)
hidden = torch.rand(1, 1, 5, 35) > 0.5
hidden[..., 2, :] = False
for mask, causal, heads, queries, keys, size, width in (
    (None, True, 2, 35, 35, 24, 8),  # two heads of the queries share one of the keys
    (hidden, False, 4, 5, 35, 8, 20),  # one query sees nothing
    (torch.randn(4, 35, 9, dtype=torch.float64)[None], False, 1, 35, 9, 8, 8),
    (None, True, 4, 40, 33, 8, 8),
):
    q, qt = torch.randn(2, 1, 4, queries, size, dtype=torch.float64)
    (k, kt), (v, vt) = (torch.randn(2, 1, heads, keys, n, dtype=torch.float64) for n in (size, width))
    g, gt = torch.randn(2, 1, 4, queries, width, dtype=torch.float64)
    of = orders.Attention(q, k, v, mask, causal, None, g, qt, kt, vt, gt)
    settings = causal, None
    found = {
        orders.result: kernels.attend(q, k, v, mask, None, *settings)[:1],
        orders.tangent: (kernels.attention_tangent(q, k, v, mask, qt, kt, vt, *settings),),
        orders.pullback: kernels.attention_pullback(g, q, k, v, mask, *settings),
        orders.pullback_tangent: kernels.attention_pullback_tangent(g, q, k, v, mask, gt, qt, kt, vt, *settings),
    }
    for formula, values in found.items():
        torch.testing.assert_close(values, orders.at_once(formula, of))
"""


OLD_TRITON = (
    importlib.util.find_spec("triton") is not None and TorchVersion(importlib.metadata.version("triton")) < "3.7"
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(
    OLD_TRITON and TorchVersion(np.__version__) >= "2.4",
    reason="the interpreter of triton before 3.7 takes arrays of one element for numbers, which NumPy 2.4 refuses",
)
@pytest.mark.parametrize("script", [KERNELS, ATTENTION], ids=["rows", "attention"])
def test_kernels_in_tritons_interpreter(script: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_tangents_of_attention_are_claimed() -> None:
    x, t = (tuple(torch.randn(1, 2, 4, 3) for _ in range(3)) for _ in range(2))
    attend = F.scaled_dot_product_attention
    f = lambda x, t: grad(lambda x: tfn.jvp(attend, x, t)[1].square().sum())(x)
    fast = jit(f, executors=["triton"])
    torch.testing.assert_close(fast(x, t), f(x, t))
    assert program(fast).count("= triton_attention_tangent(") == program(fast).count("= triton_attention_pullback") == 1


# ---- sdpa ----


@pytest.mark.filterwarnings("ignore:.*takes nothing of:thunder_fn.errors.RegionWarning")
def test_attention_on_the_chosen_kernel() -> None:
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    mask = torch.rand(8, 8) > 0.3
    for options, kernel in (({"is_causal": True}, "flash"), ({"attn_mask": mask}, "flash"), ({"scale": 0.5}, "flash")):
        f = jit(lambda q, k, v, options=options: F.scaled_dot_product_attention(q, k, v, **options), executors=["sdpa"])
        torch.testing.assert_close(f(q, k, v), F.scaled_dot_product_attention(q, k, v, **options))
        assert f"kernel='{kernel}'" in program(f)
    g = jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), executors=["sdpa"])
    g(q, k, v)
    assert "kernel=" not in program(g), "random numbers are PyTorch's"
    h = grad(jit(lambda q: F.scaled_dot_product_attention(q, k, v).sum(), executors=["sdpa"]))
    torch.testing.assert_close(h(q), torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q))


def test_choose_kernel_by_type() -> None:
    def kernel(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", heads: int | None = None) -> str:
        with torch._subclasses.FakeTensorMode():
            q = torch.empty(shape, dtype=dtype, device=device)
            k = torch.empty((shape[0], heads or shape[1], *shape[2:]), dtype=dtype, device=device)
            return choose_kernel(q, k, k, None)

    assert kernel(2, 4, 8, 16) == "flash" and kernel(2, 4, 8, 16, heads=2) == "math"
    assert kernel(4, 8, 16) == "math" and kernel(2, 4, 0, 16) == "math"
    assert kernel(2, 4, 8, 64, dtype=torch.bfloat16, device="cuda") == "flash"
    assert kernel(2, 4, 8, 64, device="cuda") == "efficient"
    assert kernel(2, 4, 8, 320, dtype=torch.bfloat16, device="cuda") == "efficient"
    assert kernel(2, 4, 8, 63, dtype=torch.bfloat16, device="cuda") == "math"
    assert kernel(2, 4, 8, 64, dtype=torch.float64, device="cuda") == "math"
    assert set(BACKENDS) == {"flash", "efficient", "math"}


# ---- cudagraphs ----


class Rerun:
    """Stands in for a CUDA graph: a replay runs the program again, on the same buffers, into the same results."""

    def __init__(self, device: str = "cpu", fail: str | None = None) -> None:
        self.device, self.fail, self.recorded, self.replayed = device, fail, 0, 0

    def missing(self) -> str | None:
        return None

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device

    def stream(self, inputs: Sequence[Any]) -> int | None:
        return 0

    def record(
        self, run: Callable[..., Any], buffers: Sequence[Any], memory: Memory
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        if self.fail:
            raise RuntimeError(self.fail)
        self.recorded += 1
        # Recording computes nothing.
        copies = [one.clone() if isinstance(one, Tensor) else one for one in buffers]
        places = [in_memory_of(one) if isinstance(one, Tensor) else one for one in buffers]
        pairs = zip(copies, places, strict=True)
        homes = {copy.untyped_storage().data_ptr(): place for copy, place in pairs if isinstance(copy, Tensor)}

        def lying(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            home = homes.get(result.untyped_storage().data_ptr())
            shape = result.shape, result.stride(), result.storage_offset()
            return result if home is None else home.as_strided(*shape)

        results = tuple(map(lying, run(*copies)))

        def replay() -> None:
            self.replayed += 1
            for result, new in zip(results, run(*places), strict=True):
                if isinstance(result, Tensor) and result.data_ptr() != new.data_ptr():
                    result.copy_(new)

        return replay, results


def in_memory_of(tensor: Tensor) -> Tensor:
    """A tensor at the same address, which holds on to nothing, as a CUDA graph does."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    raw = (ctypes.c_char * (count * tensor.element_size())).from_address(tensor.untyped_storage().data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def test_cudagraphs_replay_on_their_own_buffers() -> None:
    device = Rerun()
    f = jit(lambda x, y: ((x * y).sin(), x + 1), executors=[CudaGraphs("graphs", device)])
    earlier = []
    for _ in range(4):
        x, y = torch.randn(3), torch.randn(3)
        before = x.clone()
        results = f(x, y)
        assert torch.equal(x, before), "arguments are left alone"
        earlier.append((results, ((x * y).sin(), x + 1)))
    for results, wanted in earlier:
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True)), "results are the caller's own"
    assert device.recorded >= 1 and device.replayed == 3


def test_cudagraphs_read_and_write_where_arguments_lie() -> None:
    """A donated argument that lies where it lay is updated there; elsewhere it is recorded anew, then copied."""
    device = Rerun()

    def step(p: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = p - 0.5 * (w * x)
        return new, new.sum()

    f = jit(step, donate_argnums=0, executors=[CudaGraphs("graphs", device)])
    w, p, wanted = torch.randn(64), torch.zeros(64), torch.zeros(64)
    address, kept = p.data_ptr(), []
    for _ in range(4):
        x = torch.randn(64)
        p, total = f(p, w, x)
        wanted = wanted - 0.5 * (w * x)
        kept.append((total, wanted.sum()))
        assert torch.equal(p, wanted) and p.data_ptr() == address
    assert all(torch.equal(a, b) for a, b in kept), "other results are the caller's own"
    assert device.recorded <= 2
    held = list[tuple[Tensor, Tensor]]()
    for _ in range(8):
        p, w, x = torch.randn(64), torch.randn(64), torch.randn(64)
        before = p.clone(), w.clone()
        result = f(p, w, x)[0]
        held.append((result, before[0] - 0.5 * (before[1] * x)))
    assert all(torch.equal(a, b) for a, b in held), "results of earlier calls stay as they are"
    assert device.recorded <= 2 + MAX_MOVES


@pytest.mark.parametrize("is_first", [False, True])
def test_cudagraphs_record_compiled_regions(is_first: bool) -> None:
    """In whatever order the executors are given."""
    device, ran = Rerun(), list[str]()

    class Counting(FusionExecutor):
        def finish(self, program: Any) -> Any:
            ran.append("finished" if isinstance(program.run, FunctionType) else "too late")
            return program

    fusion = Counting("counting", fuse=lambda region: lambda *xs: tfn.evaluate(region, xs))
    fusion.register_supported(torch.sin)
    fusion.register_supported(torch.mul)
    executors = [fusion, CudaGraphs("graphs", device)]
    f = jit(lambda x: x.sin() * x, executors=executors[::-1] if is_first else executors)
    for _ in range(2):
        assert torch.equal(f(x := torch.randn(3)), x.sin() * x)
    assert device.recorded and ran == ["finished"]


def test_cudagraphs_keep_nothing_alive() -> None:
    f = jit(lambda p: p * 2, executors=[CudaGraphs("graphs", Rerun())])
    p = torch.ones(3)
    for _ in range(3):
        f(p)
    gone = weakref.ref(p.untyped_storage())
    assert internals.is_exclusive(p)
    del p
    assert gone() is None


def test_cudagraphs_results_in_the_memory_of_arguments() -> None:
    f = jit(lambda x: (x[1:], x.t(), x * 2), executors=[CudaGraphs("graphs", Rerun())])
    x = torch.randn(3, 4)
    for _ in range(3):
        found = f(x)
        for mine, wanted in zip(found, (x[1:], x.t(), x * 2), strict=True):
            assert torch.equal(mine, wanted) and mine.stride() == wanted.stride()
        assert found[0].data_ptr() == x[1:].data_ptr() and found[1].data_ptr() == x.data_ptr()


def test_cudagraphs_run_both_halves_of_a_gradient() -> None:
    device = Rerun()
    f = jit(lambda x: (x.sin() * x).sum(), executors=[CudaGraphs("graphs", device)])
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        f(x).backward()
        torch.testing.assert_close(x.grad, (x.cos() * x + x.sin()).detach())
    assert device.recorded >= 2


def test_what_a_backward_reads_is_lent() -> None:
    """Residuals are not copied. While somebody holds them, calls run as they are."""
    device = Rerun()
    f = jit(lambda x, w: ((x * w).sin() * w).exp(), executors=[CudaGraphs("graphs", device)])
    w, kept = torch.randn(3, requires_grad=True), list[tuple[Tensor, Tensor]]()
    for step in range(8):
        xs = [torch.randn(3) for _ in range(1 + step % 2)]
        values = [f(x, w) for x in xs]  # a second forward before the backward of the first
        grads = [torch.autograd.grad(value.sum(), w, retain_graph=step == 5)[0] for value in values]
        for x, value, found in zip(xs, values, grads, strict=True):
            wanted = ((x * w).sin() * w).exp()
            kept += [(value.detach(), wanted.detach()), (found, torch.autograd.grad(wanted.sum(), w)[0])]
    for found, wanted in kept:
        torch.testing.assert_close(found, wanted)
    assert device.replayed > 8 and device.recorded < 8


def test_cudagraphs_where_they_pay() -> None:
    device = Rerun()
    graphs = CudaGraphs("graphs", device, why_not=lambda trace: None if len(trace.equations) > 1 else "it is small")
    small, large = jit(lambda x: x.sin(), executors=[graphs]), jit(lambda x: x.sin() * 2, executors=[graphs])
    for _ in range(5):
        assert torch.equal(small(x := torch.randn(3)), x.sin()) and torch.equal(large(x), x.sin() * 2)
    assert (device.recorded, device.replayed) == (1, 3)
    assert "graphs is not asked: no graph is recorded: it is small" in str(tfn.explain_claims(small, x))


def test_a_recording_that_nobody_asked_for_fails_with_a_word() -> None:
    """Once: it is not tried again, and the report says why."""
    graphs = CudaGraphs("graphs", Rerun(fail="not permitted"), why_not=lambda trace: None)
    f = jit(lambda x: x.sin() * 2, executors=[graphs])
    with pytest.warns(RegionWarning) as said:
        for _ in range(5):
            assert torch.equal(f(x := torch.randn(3)), x.sin() * 2)
    reason = "RuntimeError: not permitted"
    assert [str(one.message).partition("\n")[0] for one in said] == [
        f"graphs: a program cannot be recorded and runs as it is: {reason}"
    ]
    report = tfn.explain_claims(f, torch.ones(3))
    assert report.left_out == (("graphs", f"no graph is recorded: {reason}"),)


def test_cudagraphs_record_each_number() -> None:
    device = Rerun()
    f = jit(lambda x, n: x.sin() * n, executors=[CudaGraphs("graphs", device)])
    for number in (2, 3, 5, 3, 5, 2):
        assert torch.equal(f(x := torch.randn(3), number), x.sin() * number)
    assert device.replayed


def test_cudagraphs_that_cannot_record() -> None:
    f = jit(lambda x: x + 1, executors=[CudaGraphs("graphs", Rerun("cuda"))])
    with pytest.warns(
        RegionWarning,
        match=r"^graphs: a program cannot be recorded and runs as it is: an input is on the cpu\nfrom: .*\nMove it to",
    ):
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    with warnings.catch_warnings():
        f(torch.zeros(2))
    g = jit(lambda x: x + 1, executors=[CudaGraphs("graphs", Rerun(fail="not permitted"))])
    with pytest.warns(RegionWarning, match=r"runs as it is: RuntimeError: not permitted\nfrom: "):
        assert torch.equal(g(torch.ones(2)), torch.full((2,), 2.0))


def test_cudagraphs_record_each_size() -> None:
    device = Rerun()
    f = jit(lambda x: x.sin() * 2, executors=[CudaGraphs("graphs", device)], dynamic=True)
    for size in (4, 5, 7, 4, 5, 6, 2, 7) * 2:
        x = torch.randn(size, 3)
        assert torch.equal(f(x), x.sin() * 2)
    assert device.recorded >= 5 and device.replayed >= 5
    with pytest.warns(RegionWarning, match="a program is recorded for 8 sizes; others run as it is") as said:
        for size in range(8, 16):
            assert torch.equal(f(x := torch.randn(size, 3)), x.sin() * 2)
    assert len(said) == 1


@pytest.mark.filterwarnings("error")
def test_cudagraphs_that_nobody_asked_for_record_the_sizes_that_come_often() -> None:
    """Sizes at which a recording pays keep one. Others make room for them, without a word."""
    device, asked = Rerun(), list[Any]()

    def why_not(trace: Any) -> str | None:
        asked.append(trace.inputs[0].type.shape[0])
        return "it is large" if asked[-1] > 20 else None

    graphs = CudaGraphs("graphs", device, why_not=why_not)
    f = jit(lambda x: x.sin() * 2, executors=[graphs])
    for size in (4, 5, *range(6, 20), *(4, 5, 30) * 5):
        assert torch.equal(f(x := torch.randn(size, 3)), x.sin() * 2)
    assert (device.recorded, device.replayed) == (2, 6)
    assert asked.count(30) == 1 and all(isinstance(size, int) for size in asked)
    for size in (*range(31, 50), 4, 5):
        f(torch.randn(size, 3))
    assert (device.recorded, device.replayed) == (2, 8)


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: x * torch.rand(()), "it draws random numbers on the CPU"),
        (lambda x: tfn.scan(lambda c, _: (c * torch.rand(()), None), x, None, length=3)[0], "random numbers on"),
        (lambda x: tfn.debug.print("{}", x) or x * 2, "it prints or calls Python in each call"),
    ],
)
def test_cudagraphs_record_nothing_that_a_replay_repeats_wrongly(f: Any, reason: str) -> None:
    device = Rerun()
    with pytest.warns(RegionWarning, match=reason):
        run = jit(f, executors=[CudaGraphs("graphs", device)])
        run(torch.ones(2)), run(torch.ones(2))
    assert not device.recorded


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cudagraphs_without_cuda() -> None:
    with pytest.raises(ExecutorError) as caught:
        jit(lambda x: x + 1, executors=["cudagraphs"])(torch.ones(2))
    assert message_of(caught.value) == (
        "cudagraphs: there is no CUDA device\nLeave the executor 'cudagraphs' out on this machine."
    )


# ---- verify ----


def wrong(factor: float, **options: Any) -> OperatorExecutor:
    """An executor whose sine is off by a factor."""
    ex = OperatorExecutor("wrong", **options)
    sine = ex.register_operator("sine", like=torch.sin, fn=lambda x: torch.sin(x) * factor)
    ex.register_implementation(torch.sin, execution_transform=sine)
    return ex


def test_verify_names_the_equation_that_is_wrong() -> None:
    f = lambda x: (x.exp().sin() + 1).cos().sum()
    x = torch.tensor([0.1, 0.7])
    for ex, fails in (
        (wrong(1.01), True),
        (wrong(1 + 1e-5), False),
        (wrong(1 + 1e-5, numerics="bitwise"), True),
        (wrong(1.001, numerics="precision-changing"), False),
        (wrong(1.0, numerics="bitwise"), False),
    ):
        g = jit(f, executors=[ex], verify=True)
        if not fails:
            torch.testing.assert_close(g(x), f(x), rtol=1e-2, atol=1e-2)
            continue
        with pytest.raises(VerificationError) as caught:
            g(x)
        lines = message_of(caught.value).splitlines()
        assert lines[0].startswith(
            f"verify: output 0 of sine, which wrong runs, is farther from its meaning than {ex.numerics!r} allows: by up to"
        )
        assert lines[1].startswith("in equation:  v2: f32[2] = sine(")
        assert lines[2].startswith(f"from:         {__file__}:{f.__code__.co_firstlineno}")


def test_verify_sees_regions_gradients_and_loops() -> None:
    bad = FusionExecutor(
        "bad", fuse=lambda region: lambda *xs: tuple(y + 1 for y in tfn.evaluate(region, xs)), min_size=1
    )
    bad.register_supported(torch.cos)
    x = torch.ones(2, requires_grad=True)
    f = jit(lambda x: x.sin().sum(), executors=[bad], verify=True)
    loss = f(x)
    with pytest.raises(VerificationError, match=r"^verify: output 0 of bad_fusion_0, which bad runs"):
        loss.backward()
    loop = jit(lambda x: tfn.fori_loop(0, 2, lambda i, y: y.cos(), x), executors=[bad], verify=True)
    with pytest.raises(VerificationError, match=r"^verify: output 0 of bad_fusion_0, which bad runs"):
        loop(torch.ones(2))


def off_by(amount: float) -> tuple[Any, ...]:
    """A compiler of regions that adds something to every float: as an executor, and as a backend of torch.compile."""

    def off(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *xs: tuple(y + amount if y.is_floating_point() else y for y in run(*xs))

    ex = FusionExecutor("off", fuse=lambda region: off(lambda *xs: tfn.evaluate(region, xs)), min_size=1)
    for op in (torch.mul, torch.add):
        ex.register_supported(op)
    return ex, backend(lambda graph, inputs: off(graph))


@pytest.mark.parametrize(
    ("dtype", "amount"), [(torch.float64, 1e-9), (torch.float32, 1e-2), (torch.float32, 2e-4), (torch.float16, 0.2)]
)
@pytest.mark.parametrize("kind", ["plain", "loop", "branch"])
def test_verify_sees_small_errors_wherever_they_are(kind: str, dtype: torch.dtype, amount: float) -> None:
    """A compiler does not change the precision of float32, whatever its label allows it to do to halves."""
    step = lambda x: x * 1.0001 + 0.5
    f = {
        "plain": step,
        "loop": lambda x: tfn.fori_loop(0, 3, lambda i, x: step(x), x),
        "branch": lambda x: tfn.cond(x.sum() > 0, step, lambda x: x * 1, (x,)),
    }[kind]
    x = torch.linspace(4.5, 5.5, 12, dtype=dtype)
    for ex in off_by(amount):
        with pytest.raises(VerificationError, match=rf"^verify: output 0 of {ex.name}_fusion_0, which {ex.name} runs"):
            jit(f, executors=[ex], verify=True)(x)
    for ex in off_by(0.0):
        assert torch.equal(jit(f, executors=[ex], verify=True)(x), f(x))


def test_verify_allows_what_the_last_bits_of_operands_do() -> None:
    """Differences of nearly equal numbers, and comparisons of equal ones: both orders of computing them are as right."""
    x = torch.tensor([1e6, 0.3, -1e6, 0.7]) * torch.linspace(1, 2, 50)[:, None]
    cases = (
        (lambda x: (x * 1.7).sum(1), lambda x: (x.double() * 1.7).sum(1).float()),
        (lambda x: x * 3 / 3 >= x, lambda x: torch.ones_like(x, dtype=torch.bool)),
    )
    for like, fn in cases:
        ex = OperatorExecutor("ex")
        op = ex.register_operator("op", like=like, fn=fn)
        assert not torch.equal(like(x), fn(x)), "else there is nothing to allow"
        assert torch.equal(jit(lambda x, op=op: op(x), executors=[ex], verify=True)(x), fn(x))
    ex = OperatorExecutor("ex")
    op = ex.register_operator("op", like=lambda x: x.sum(1) > 0, fn=lambda x: x.sum(1) < 0)
    with pytest.raises(VerificationError, match=r"50 of 50 elements differ$|elements differ\nin equation"):
        jit(lambda x: op(x), executors=[ex], verify=True)(x)


def test_verify_of_programs_with_symbols() -> None:
    """Sizes and numbers that are symbols, in a loop too, and a size that is found in data."""
    good, bad = (OperatorExecutor(name) for name in ("good", "bad"))
    for ex, factor in ((good, 1.0), (bad, 1.01)):
        sine = ex.register_operator("sine", like=torch.sin, fn=lambda x, factor=factor: x.sin() * factor)
        ex.register_implementation(torch.sin, execution_transform=sine)
    plain = lambda x, n: (x * n).sin() * 2 + n
    loop = lambda x, n: tfn.fori_loop(0, 2, lambda i, y: plain(y, n), x)
    found = lambda x, n: (x[x > 0] * n).sin()
    for f in (plain, loop, found):
        g = jit(f, executors=[good], verify=True, cache="symbolic values")
        for n in (2, 3, 5):
            x = torch.randn(n, 4)
            torch.testing.assert_close(g(x, n), f(x, n))
    with pytest.raises(VerificationError, match=r"^verify: output 0 of sine, which bad runs"):
        jit(plain, executors=[bad], verify=True, cache="symbolic values")(torch.ones(3, 4), 3)


def test_verify_of_programs_that_write_to_their_arguments() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2).add_(1)
        return x.t(), torch.bernoulli(torch.full_like(y, 0.5)).mul(2).add(x)

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    mine, ex = x.clone(), off_by(0.0)[0]
    torch.manual_seed(1)
    found = jit(f, executors=[ex], verify=True)(mine, y)
    torch.manual_seed(1)
    wanted = f(x, y)
    assert torch.equal(mine, x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:.*takes nothing of:thunder_fn.errors.RegionWarning")
def test_verify_lets_good_programs_pass() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Linear(8, 2))
    f = jit(model, executors=["triton", "sdpa"], verify=True)
    torch.manual_seed(3)
    found = f(x)
    torch.manual_seed(3)
    assert torch.equal(found, model(x)), "random numbers are drawn once"
    found.sum().backward()
    with pytest.raises(JitError, match=r"^jit: verify is True, False or .errors., given .yes."):
        jit(model, verify="yes")


def test_verify_sees_an_execution_transform_that_computes_something_else() -> None:
    x = torch.tensor([0.5, 2.0])
    taylor = OperatorExecutor("taylor", numerics="bitwise")
    taylor.register_implementation(torch.sin, execution_transform=lambda x: x - x**3 / 6)
    f = jit(lambda x: torch.sin(x) + 1, executors=[taylor], verify=True)
    with pytest.raises(
        VerificationError, match=r"^verify: output 0 of the program \S+ is farther from its meaning"
    ) as caught:
        f(x)
    assert message_of(caught.value).splitlines()[-1] == (
        "Each call is right, so an execution transform computes something else: taylor for aten.sin.default"
    )
    loop = jit(lambda x: tfn.fori_loop(0, 2, lambda i, x: torch.sin(x) + 1, x), executors=[taylor], verify=True)
    with pytest.raises(
        VerificationError, match=r"(?m)an execution transform computes something else: taylor for aten.sin"
    ):
        loop(x)
    same = OperatorExecutor("same", numerics="bitwise")
    same.register_implementation(torch.sin, execution_transform=lambda x: -torch.sin(-x))
    torch.testing.assert_close(jit(torch.sin, executors=[same], verify=True)(x), torch.sin(x))
