"""Plugins: small recipes that are added to others, and raise where they cannot apply."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import thunder_fn as tfn
from tests.executors.test_builtin import Rerun
from tests.messages import message_of
from tests.unit.capturing import same
from thunder_fn import recipes
from thunder_fn.errors import JitError, RecipeError, TraitError
from thunder_fn.executors.cudagraphs import CudaGraphs
from thunder_fn.jitted import last_traces
from thunder_fn.parameters import simulated

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about what is asked for, and run on PyTorch's ops."""
    monkeypatch.setattr(recipes.recipe, "machine_executors", lambda: ())


@pytest.mark.parametrize(("name", "bound"), (("quantize_int8", 0.02), ("quantize_nf4", 0.2)))
def test_quantize(name: str, bound: float) -> None:
    module, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(4, 64)
    compiled = tfn.compile(module, [name])
    assert (compiled(x) - module(x)).abs().max() < bound and list(compiled.state_dict()) == list(module.state_dict())


def test_plugins_that_cannot_apply_raise() -> None:
    with pytest.raises(RecipeError, match="quantize_int8: a ReLU has no floating parameter of two or more dims"):
        tfn.compile(nn.ReLU(), "quantize_int8")
    with pytest.raises(RecipeError, match="quantize_int8: a builtin_function_or_method has no parameters of its own"):
        tfn.compile(torch.sin, "quantize_int8")
    with pytest.raises(TraitError, match="'quantize_int8' and 'quantize_nf4' conflict"):
        tfn.compile(nn.Linear(64, 64), ["quantize_int8", "quantize_nf4"])
    with pytest.raises(JitError, match="'quantize_int8' is precision-changing"):
        tfn.compile(nn.Linear(64, 64), "quantize_int8", numerics="bitwise")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ("fsdp", "ddp"))
def test_spread_over_ranks(name: str) -> None:
    """Of one rank, the loss and gradients are eager's; the mesh is that of all ranks unless one is given."""
    module, mesh = nn.Linear(3, 4), torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    expected = module(X).pow(2).sum()
    gradients = torch.autograd.grad(expected, [module.bias, module.weight])
    for recipe in (name, recipes.get(name)(mesh, bucket="each")):
        compiled = tfn.compile(module, recipe)
        loss = compiled(X).pow(2).sum()
        assert same(loss, expected)
        found = torch.autograd.grad(loss, [param for _, param in sorted(compiled.named_parameters())])
        assert all(map(same, found, gradients))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("spread", ("fsdp", "ddp"))
@pytest.mark.parametrize("quantize", ("quantize_int8", "quantize_nf4"))
def test_either_order_is_one_program(quantize: str, spread: str) -> None:
    module, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(4, 64)
    first, second = (tfn.compile(module, order) for order in ([quantize, spread], [spread, quantize]))
    assert same(first(x), second(x)) and last_traces(first)[0] == last_traces(second)[0]
    for recipe in (recipes.get(quantize)() + recipes.get(spread)(), recipes.get(spread)() + recipes.get(quantize)()):
        lines = recipe.explain(module).splitlines()
        assert lines[3].startswith(f"  1. {quantize} (on the model, precision-changing)")
        assert lines[4].startswith(f"  2. {spread} (on the model, reassociating)")
        assert lines[4].endswith(f"; after {quantize}, as {quantize} says")


def test_reduce_overhead() -> None:
    """On a stand-in for the device that records."""
    module, device = nn.Linear(3, 4), Rerun()
    compiled = tfn.compile(module, recipes.plugins.ReduceOverhead(CudaGraphs("graphs", device)))
    with torch.no_grad():
        assert same(compiled(X), module(X)) and same(compiled(X + 1), module(X + 1)) and device.replayed == 1
    with pytest.raises(RecipeError) as caught:
        tfn.compile(module, recipes.plugins.ReduceOverhead(CudaGraphs("graphs", Rerun("cuda"))))
    assert message_of(caught.value) == (
        "reduce_overhead: the model is on a cpu, where programs cannot be recorded\nMove it to the device first."
    )


def test_fp8_where_hardware_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are on no device, of which validation sees types only."""

    def answer(*sizes: int, dtype: torch.dtype) -> str:
        with FakeTensorMode():
            model = nn.ParameterDict({"w": torch.empty(sizes, dtype=dtype, device="cuda:0")})
        try:
            return recipes.get("fp8")().assemble(model).transforms[0].name
        except RecipeError as error:
            return str(error).splitlines()[0]

    capability = (8, 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    older = "fp8: cuda:0 has compute capability 8.9, and fp8 arithmetic with a scale for each row takes 9.0"
    assert answer(16, 32, dtype=torch.bfloat16) == older
    capability = (9, 0)
    unsuited = (
        "fp8: no matrix of the model is in bfloat16 with both sizes multiples of 16, as PyTorch's kernel takes it"
    )
    assert answer(16, 32, dtype=torch.float32) == answer(16, 30, dtype=torch.bfloat16) == unsuited
    assert answer(16, 32, dtype=torch.bfloat16) == "quantize_fp8_dynamic"


@pytest.mark.parametrize(
    ("name", "error"),
    (
        (
            "fp8",
            "fp8: the model is on a cpu, which has no fp8 arithmetic\n"
            'Quantise without: `quantize(model, "fp8")` stores eight bits on any machine.',
        ),
        (
            "fsdp",
            "fsdp: there is no process group, and no mesh was given\n"
            'Start under torchrun and call `torch.distributed.init_process_group`, or pass `get("fsdp")(mesh)`.',
        ),
        (
            "reduce_overhead",
            "reduce_overhead: there is no CUDA device\nLeave reduce_overhead out on this machine.",
        ),
    ),
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is the hardware")
def test_plugins_say_what_is_missing(name: str, error: str) -> None:
    with pytest.raises(RecipeError) as caught:
        tfn.compile(nn.Linear(16, 16), name)
    assert message_of(caught.value) == error


def test_plugins_of_parameters_take_modules() -> None:
    for name in ("quantize_nf4", "fsdp", "ddp", "fp8"):
        with pytest.raises(RecipeError, match=f"{name}: a builtin_function_or_method has no parameters of its own"):
            tfn.compile(torch.sin, name)
    with pytest.raises(RecipeError, match="ddp: a ReLU has no parameters"):
        tfn.compile(nn.ReLU(), "ddp")
    with pytest.raises(TraitError, match="'ddp' and 'fsdp' conflict"):
        mesh = simulated(2)[0]
        (recipes.get("ddp")(mesh) + recipes.get("fsdp")(mesh)).assemble(nn.Linear(3, 3))
    with pytest.raises(RecipeError) as caught:
        tfn.compile(nn.Linear(64, 64), "quantize_int8", frontend="dynamo")
    assert message_of(caught.value) == (
        "the frontend 'dynamo' cannot trace what a rewrite such as quantize or fsdp made: it is captured directly\n"
        'Leave `frontend="dynamo"` out, or that recipe.'
    )
