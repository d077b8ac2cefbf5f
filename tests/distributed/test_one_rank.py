"""Tests of collectives that run without a second process: a group of one gloo rank."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.distributed.agreement import _bits
from thunder_fn.distributed.heartbeat import text_on_ranks
from thunder_fn.errors import DistributedError, RewriteError
from thunder_fn.testing.laws.rewriting import OF_REWRITES


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("one") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Counts the collectives that run; those of one name are cut off."""

    def __init__(self, lost: str = "") -> None:
        super().__init__()
        self.counts, self.lost = Counter[str](), lost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.counts[func.overloadpacket.__name__] += 1
            if func.overloadpacket.__name__ == self.lost:
                raise RuntimeError("Connection reset by peer")
        return func(*args, **kwargs or {})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()


def test_ranks_tell_each_other_no_index_of_a_device() -> None:
    """Each rank has a GPU of its own."""
    with FakeTensorMode():
        texts = {text_on_ranks(torch.empty(2, 3, device=f"cuda:{rank}")) for rank in range(2)}
    assert texts == {"cuda f32[2, 3]"}


@pytest.mark.parametrize("zero", [2, 3])
def test_a_module_that_is_not_jitted_gathers_again_under_zero_3(mesh: DeviceMesh, zero: int) -> None:
    module, whole, x = tfn.fsdp(model(), mesh, zero=zero, prefetch=None), model(), torch.randn(2, 3).double()
    x.requires_grad_()
    with Sent() as sent:
        module(x).square().sum().backward()
    whole(x).square().sum().backward()
    assert sent.counts["all_gather_into_tensor"] == 2 * (zero - 1)
    assert sent.counts["reduce_scatter_tensor"] == 2
    for name, p in whole.named_parameters():
        torch.testing.assert_close(module.parts()[name].grad, p.grad)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_that_is_lost_before_the_backward_of_eager_code_is_an_error_that_names_the_equation(
    mesh: DeviceMesh, zero: int
) -> None:
    loss = tfn.fsdp(model(), mesh, zero=zero)(torch.randn(2, 3).double()).sum()
    with pytest.raises(DistributedError) as error, Sent(lost="reduce_scatter_tensor"):
        loss.backward()
    lines = message_of(error.value).splitlines()
    name = "_c10d_functional.reduce_scatter_tensor.default"
    assert lines[0] == f"{name}: the collective failed on the only rank: Connection reset by peer"
    assert lines[1].startswith("in equation:") and "= _c10d_functional.reduce_scatter_tensor.default(" in lines[1]
    assert lines[2].startswith("from:") and "test_one_rank.py" in lines[2]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("transform", [tfn.fsdp, tfn.ddp])
def test_what_nothing_reads_has_no_gradient_whatever_the_buckets(mesh: DeviceMesh, transform: Any, jit: bool) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    for bucket in ("block", None, 10**6):
        module = transform(tfn.jit(Partly()) if jit else Partly(), mesh, bucket=bucket)
        module(torch.ones(1, 2)).sum().backward()
        found = {name: p.grad is not None for name, p in module.parts().items()}
        assert found == {name: name.startswith("used") for name in found}, bucket


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("transform", [tfn.fsdp, tfn.ddp])
def test_what_no_batch_reads_has_no_gradient_when_gradients_accumulate(
    mesh: DeviceMesh, transform: Any, jit: bool
) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
            return (self.one if first else self.other)(x)

    module = transform(tfn.jit(Either()) if jit else Either(), mesh)
    with module.accumulate():
        module(torch.ones(1, 2), True).sum().backward()
    assert {name for name, p in module.parts().items() if p.grad is not None} == {"one.weight", "one.bias"}


class Odd(nn.Module):
    """Complex, half, empty and frozen parameters, of dtypes that gloo knows and others; a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.parts, self.scale = nn.Parameter(torch.randn(4).half()), nn.Parameter(torch.tensor(2.0))
        self.empty, self.flat = nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.short = nn.Parameter(torch.tensor([1, 2], dtype=torch.int16), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        row = self.matrix @ (x * self.parts * self.mask + self.frozen).to(torch.complex64)
        return (
            row.abs().square().sum() * self.scale + self.empty.sum() + self.flat.sum() + self.short.sum() * self.count
        )


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("options", [{}, {"prefetch": 1}, {"zero": 2, "bucket": 64}, None])
def test_parameters_of_any_dtype_and_shape(mesh: DeviceMesh, options: Any, jit: bool) -> None:
    whole, given = Odd(), tfn.jit(Odd()) if jit else Odd()
    module, x = tfn.ddp(given, mesh) if options is None else tfn.fsdp(given, mesh, **options), torch.randn(4)
    for each in (whole, module):
        each(x).backward()
        each(x).backward()
    for name, p in whole.named_parameters():
        found = module.parts()[name].grad
        assert (found is None) == (p.grad is None), name
        if found is not None:
            torch.testing.assert_close(found.reshape(p.shape), p.grad)
    norm = nn.utils.clip_grad_norm_([p for p in whole.parameters() if p.numel()], 0.1)
    torch.testing.assert_close(module.clip_grad_norm_(0.1), norm, rtol=1e-4, atol=0)  # theirs adds up halves in float16
    torch.testing.assert_close(module.parts()["matrix"].grad, whole.matrix.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.state_dict(), whole.state_dict())


@pytest.mark.parametrize("zero", [2, 3])
def test_under_transforms_of_torch_func(mesh: DeviceMesh, zero: int) -> None:
    """functorch would send each example's alone and not wait for any: what came was what lay there."""

    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(params["w"] @ x).square().sum()

    params, xs = {"w": torch.randn(3, 2).double()}, torch.randn(4, 2).double()
    ways = {f"fsdp, prefetch={count}": tfn.fsdp(f, mesh, zero=zero, prefetch=count) for count in (0, 1)}
    transforms = {**ways, "ddp": tfn.ddp(f, mesh)}
    for name, q in {**transforms, "tensor_parallel": tfn.tensor_parallel(f, mesh, {"w": "column"})}.items():
        new = q.prepare(params)
        call = lambda own, x, q=q, new=new: q(new.replaced(own), x)
        for transform in (torch.func.grad, torch.func.hessian, lambda g: torch.func.jacrev(torch.func.grad(g))):
            batched = [torch.func.vmap(transform(g), in_dims=(None, 0))(params, xs) for g in (call, f)]
            torch.testing.assert_close(*batched, msg=name)
        together = {"w": torch.stack([params["w"], -params["w"]])}
        torch.testing.assert_close(*(torch.func.vmap(g, in_dims=(0, None))(together, xs[0]) for g in (call, f)))


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_frozen_parameters_are_not_sent(mesh: DeviceMesh, jit: bool) -> None:
    """Nor computed: what is frozen travels apart from what is trained, adapters apart from what they adapt."""
    x, numbers = torch.randn(2, 3).double(), []

    class Numbers(Sent):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("reduce_scatter_tensor", "all_reduce"):
                numbers.append(args[0].numel())
            return super().__torch_dispatch__(func, types, args, kwargs)

    make = lambda: tfn.jit(model()) if jit else model()
    half = make()
    half[0].weight.requires_grad_(False)
    for transform in (tfn.fsdp, tfn.ddp, lambda f, mesh: tfn.fsdp(f, mesh, bucket=10**6)):
        adapted = (transform(tfn.lora(make(), 2), mesh), tfn.lora(transform(make(), mesh), 2))
        for module in (transform(half, mesh), *adapted):
            numbers.clear()
            with Numbers():
                module(x).square().sum().backward()
            assert sum(numbers) == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_optimizers_whose_state_is_no_share(mesh: DeviceMesh) -> None:
    module = tfn.fsdp(model(), mesh)
    for optimizer, text in (
        (
            torch.optim.Adafactor(module.parameters()),
            "optimizer state: the 'col_var' that Adafactor keeps of '0.weight' is no share of anything\n"
            "Use an optimizer that keeps tensors of the shapes of its parameters, such as AdamW.",
        ),
        (
            torch.optim.AdamW(model().parameters()),
            "optimizer state: the optimizer has parameters that are not the module's\nMake it of `module.parameters()`.",
        ),
    ):
        with pytest.raises(RewriteError) as error:
            module.sharded_optimizer_state_dict(optimizer)
        assert message_of(error.value) == text
    before, optimizer = module.state_dict(), torch.optim.AdamW(module.parameters())
    state = module.sharded_optimizer_state_dict(optimizer)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert state["state"]["0.weight"]["step"] == 0 and all(p.grad is None for p in module.parameters())
    with pytest.raises(
        RewriteError, match=r"optimizer state: the state is of another optimizer or other parameters: 0.bias"
    ):
        module.load_optimizer_state_dict(torch.optim.SGD(module.parameters(), momentum=0.9), state)


def test_floats_of_eight_bits_are_gathered(mesh: DeviceMesh) -> None:
    x = torch.randn(2, 3)
    module = model().float()
    torch.testing.assert_close(tfn.fsdp(tfn.quantize(module, "fp8"), mesh)(x), tfn.quantize(module, "fp8")(x))


def test_dynamo_leaves_rewritten_modules_and_transforms_alone(mesh: DeviceMesh) -> None:
    x, module = torch.randn(2, 3).double(), tfn.fsdp(model(), mesh)
    torch.testing.assert_close(torch.compile(module, backend="eager")(x), model()(x))
    gradient = tfn.grad(lambda x: x.sin().sum())
    torch.testing.assert_close(torch.compile(lambda x: gradient(x) + 1, backend="eager")(x), x.cos() + 1)


@pytest.mark.parametrize("name", OF_REWRITES)
def test_laws_of_rewrites(name: str) -> None:
    """Some of the cases; all of them are the corpus in which planted bugs are looked for."""
    law, cases = OF_REWRITES[name]
    for case in cases[::7]:
        law(case)


@pytest.mark.parametrize("share", [tfn.fsdp, tfn.ddp])
def test_a_module_that_was_distributed_is_calibrated_as_one_that_was_not(mesh: DeviceMesh, share: Any) -> None:
    samples = [(torch.randn(2, 3),)]
    alone, shared = (tfn.quantize(m, "int8_static") for m in (model().float(), share(model().float(), mesh)))
    alone.calibrate(samples)
    shared.calibrate(samples)
    torch.testing.assert_close(shared(*samples[0]), alone(*samples[0]))


def test_what_ranks_prepared_before_a_group_was_made_again_is_not_compared() -> None:
    """Under torchrun the store outlives the group."""
    script = """
import torch.distributed as dist
from thunder_fn.distributed.heartbeat import other_than
store = dist.HashStore()
for what in ("one model", "another"):
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert other_than("0", what) is None
    dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_ranks_that_hold_the_same_numbers_in_another_order_are_not_the_same() -> None:
    eye = torch.eye(3)
    assert len({_bits(value) for value in (eye, eye[[1, 0, 2]], -eye, eye.bool(), torch.empty(0))}) == 5


def test_ranks_compare_tensors_that_are_views_of_their_conjugates() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    for value in (numbers.conj(), numbers.conj().imag):
        assert _bits(value) == _bits(value.clone().resolve_conj().resolve_neg()) != _bits(value + 1)
