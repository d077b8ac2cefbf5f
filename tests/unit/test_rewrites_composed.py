"""Rewrites beside what else there is: checkpoints, autocast, symbolic sizes, threads, dtypes, jitted functions inside."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import RewriteError
from thunder_fn.parameters import SCHEMES, Scheme

ROUNDING = {"int8_dynamic": 0.02, "int8_static": 0.05, "fp8_dynamic": 0.1}
"""The distance that rounded activations bring into results, beside the greatest."""


def linear(params: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, params["w"], params["b"])


def prepared(q: Any, scheme: str, rows: int = 32, x: torch.Tensor | None = None) -> Any:
    torch.manual_seed(0)
    new = q.prepare({"w": torch.randn(rows, 64), "b": torch.randn(rows)})
    return q.calibrate(new, [(torch.randn(4, 64) if x is None else x,)]) if scheme == "int8_static" else new


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance, beside the greatest."""
    have, want = found.detach().double(), expected.detach().double()
    return float((have - want).abs().max() / want.abs().max())


def kept_floats(call: Callable[[], torch.Tensor], size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A result, and the floating tensors of so many numbers that its backward holds."""
    kept = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        found = call()
    return found, [value for value in kept if value.numel() >= size and value.itemsize > 1]


def program(q: Any) -> str:
    return str(tfn.last_traces(q)[-1])


# ---- checkpoints, and jitted functions inside ----


@pytest.mark.parametrize(("scheme", "jitted"), [*((name, True) for name in SCHEMES), ("int8", False), ("nf4", False)])
def test_codes_go_into_checkpoints(scheme: str, jitted: bool) -> None:
    """A layer in a checkpoint works on its codes, as outside; nothing decoded is kept for the backward."""
    plain = tfn.quantize(linear, scheme)
    inside = tfn.checkpoint(linear)
    q, x = tfn.quantize(tfn.jit(inside) if jitted else inside, scheme), torch.randn(3, 64)
    new = prepared(q, scheme, x=x)
    own = plain.prepare(new.restore()).replaced(dict(new))
    found, kept = kept_floats(lambda: q(new, x.requires_grad_()), 32 * 64)
    expected = plain(own, x)
    assert not kept and off(found, expected) < 1e-5
    for have, want in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)), strict=True):
        assert off(have, want) < 1e-4


def test_codes_go_into_jitted_functions() -> None:
    inner = tfn.jit(lambda w, x: F.linear(x, w))
    q, x = tfn.quantize(tfn.jit(lambda params, x: inner(params["w"], x).relu()), "nf4"), torch.randn(3, 64)
    new = prepared(q, "nf4")
    assert off(q(new, x), F.linear(x, new.restore()["w"]).relu()) < 1e-5
    assert "quantized.nf4_linear" in program(q.jitted)


# ---- autocast ----

WAYS: dict[str, Callable[[Any], Any]] = {
    **{scheme: lambda f, scheme=scheme: tfn.quantize(f, scheme) for scheme in SCHEMES},
    "lora": lambda f: tfn.lora(f, 2),
    "int8 and lora": lambda f: tfn.lora(tfn.quantize(f, "int8"), 2),
    "training": lambda f: tfn.quantize(f, "int8", training=True),
}


@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, torch.bfloat16) for way in WAYS), ("int8", torch.float16), ("nf4", torch.float16)]
)
def test_autocast_around_and_inside(way: str, dtype: torch.dtype) -> None:
    """PyTorch's region, ours around what was rewritten and ours before: as on the restored weight, results' dtypes too."""
    net = lambda params, x: F.linear(F.layer_norm(F.linear(x, params["w"], params["b"]), (64,)), params["w"])
    x, rewrite = torch.randn(3, 64), WAYS[way]
    q, before = rewrite(tfn.jit(net)), rewrite(tfn.jit(tfn.autocast(net, dtype)))
    torch.manual_seed(0)
    new = q.prepare({"w": torch.randn(64, 64), "b": torch.randn(64)})
    if way == "int8_static":
        new = q.calibrate(new, [(x,)])
    new = new.replaced({name: torch.randn_like(value) for name, value in new.items() if name.endswith("lora_b")})
    weights = q.whole(new)
    with torch.autocast("cpu", dtype=dtype):
        expected, region = net(weights, x), q(new, x)
    every = (region, tfn.autocast(q, dtype)(new, x), before(before.prepare(new.restore()).replaced(dict(new)), x))
    for found in every:
        assert found.dtype == expected.dtype == dtype
        assert off(found, expected) < ROUNDING.get(way, 0) + 0.03


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_kernels_under_autocast(scheme: str) -> None:
    """A weight that autocast casts is still codes, whose product is ours or PyTorch's, by the processor."""
    q, x = tfn.lora(tfn.quantize(tfn.jit(linear), scheme), 2), torch.randn(3, 64)
    new, names = prepared(q, scheme), (f"quantized.{scheme}_linear as codes", "_weight_int8pack_mm")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q(new, x)
    assert any(name in program(q.jitted) for name in names)
    before = tfn.quantize(tfn.jit(tfn.autocast(linear)), scheme)
    before(before.prepare(new.restore()), x)
    assert any(name in program(before.jitted) for name in names)


# ---- sizes, dtypes, threads, copies ----


@pytest.mark.parametrize("way", ["int8", "int8_static", "nf4", "int8 and lora"])
def test_one_program_for_all_batch_sizes(way: str) -> None:
    layer = nn.Linear(64, 16).requires_grad_(False)
    q = WAYS[way](tfn.jit(layer, dynamic=True))
    if way == "int8_static":
        q.calibrate([(torch.randn(50, 64),)])
    for count in (2, 5, 33, 9):
        x = torch.randn(count, 64)
        assert off(q(x), q.restored()(x)) < ROUNDING.get(way, 0) + 1e-4
    assert tfn.cache_info(q.jitted).misses == 2
    q(torch.randn(7, 64, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_half_precision_neither_overflows_nor_vanishes(scheme: str, jitted: bool, size: float) -> None:
    """Sums of codes are beyond the greatest fp16 number, scales next to the smallest: neither is met."""
    layer = nn.Linear(1024, 16, bias=False).half().requires_grad_(False)
    layer.weight.data = layer.weight.sign() * size if size < 1 else layer.weight * 0 + 1
    q = tfn.quantize(tfn.jit(layer) if jitted else layer, scheme)
    exact = layer.weight.double()
    for count in (1, 40):
        x = torch.ones(count, 1024).half().requires_grad_()
        if scheme == "int8_static":
            q.calibrate([(x.detach(),)])
        y = q(x)
        (found,) = torch.autograd.grad(y, x, torch.full_like(y, 1e-2))
        assert float((y.double() - x.double() @ exact.t()).detach().abs().max()) < 1e-2 * size * 1024
        assert off(found, torch.full((count, 16), 1e-2).half().double() @ exact) < 1e-2


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_is_not_asked_for(default: torch.dtype) -> None:
    w = torch.randn(16, 128)
    plain = {name: scheme.encode(w) for name, scheme in SCHEMES.items()}
    torch.set_default_dtype(default)
    try:
        found = {name: scheme.encode(w) for name, scheme in SCHEMES.items()}
        decoded = {name: SCHEMES[name].decode(parts, (16, 128), torch.float32) for name, parts in found.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)
    assert all(bool(((decoded[name] - w).abs() <= SCHEMES[name].bound(w)).all()) for name in SCHEMES)


def test_threads_call_one_module() -> None:
    """The module that is captured is one, for all threads."""
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).requires_grad_(False)
    q, found, failed = tfn.quantize(module, "int8"), dict[int, torch.Tensor](), list[BaseException]()

    def call(count: int) -> None:
        try:
            found[count] = q(torch.ones(count, 64))
        except BaseException as error:  # noqa: BLE001  shown below
            failed.append(error)

    threads = [threading.Thread(target=call, args=(count,)) for count in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    for count, y in found.items():
        torch.testing.assert_close(y, q(torch.ones(count, 64)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_of_prepared_parameters_are_taken(scheme: str) -> None:
    q, x = tfn.quantize(linear, scheme), torch.randn(3, 64)
    new = prepared(q, scheme)
    for other in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert torch.equal(q(other, x), q(new, x)) and torch.equal(copy.deepcopy(q)(new, x), q(new, x))


# ---- what modules may have, and what states may lack ----


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_state_lacks_stays_to_the_bit(scheme: str) -> None:
    q = tfn.lora(tfn.quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), scheme), 2)
    before = {name: value.clone() for name, value in q.parts().items()}
    q.load_state_dict({"0.bias": torch.zeros(64)}, strict=False)
    moved = [name for name, value in q.parts().items() if not value.float().equal(before[name].float())]
    steps = [name for name in moved if not bool(before[name].isnan().all())]  # steps of activations are NaN
    assert steps == ["0.bias"]


class Odd(nn.Module):
    """A weight that a hook computes in each call, extra state, and names that a rewritten module has for itself."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):
            self.normed = nn.utils.weight_norm(nn.Linear(6, 4))
        self.merge, self.parts = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.times = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"times": self.times}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.times = state["times"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.linear(self.normed(x), self.merge, self.parts)) * self.scale * self.times


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_odd_modules(jitted: bool) -> None:
    module, x = Odd(), torch.randn(3, 6)
    q = tfn.quantize(tfn.jit(module) if jitted else module, "int8", filter=lambda name, shape: True)
    torch.testing.assert_close(q(x), q.restored()(x), rtol=1e-4, atol=1e-4)
    assert list(q.state_dict()) == list(module.state_dict())
    y = q(x)
    q.load_state_dict(q.state_dict() | {"_extra_state": {"times": 6}})
    torch.testing.assert_close(q(x), 2 * y, rtol=0.02, atol=0.02)


def test_weights_of_eight_bits_stay() -> None:
    w = torch.randn(4, 8).to(torch.float8_e4m3fn)
    assert list(tfn.quantize(lambda w, x: F.linear(x, w.to(x.dtype)), "int8").prepare(w)) == [""]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "lazy": (
        lambda: tfn.quantize(nn.LazyLinear(4), "int8"),
        "the parameter 'weight' of the LazyLinear has no shape yet\n"
        "Call the module once, which gives it one, and rewrite it then.",
    ),
    "rank": (lambda: tfn.lora(nn.Linear(3, 4), 2.5), "lora: the rank is a number from 1 on, given 2.5"),  # type: ignore[arg-type]
    "alpha": (lambda: tfn.lora(nn.Linear(3, 4), 2, alpha=float("nan")), "lora: alpha is a finite number, given nan"),
    "convolution": (
        lambda: tfn.lora(nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(3, 4)), 2, filter="0.weight"),
        "lora: the filter '0.weight' matches no parameter of two dims\nThere are 1.weight.",
    ),
    "stack": (
        lambda: tfn.quantize(nn.Linear(3, 4), stacked="*.weight"),
        "quantize: the filter '*.weight' matches no parameter of three or more dims\nThere are no such parameters.",
    ),
    "trace": (
        lambda: tfn.quantize(tfn.trace(torch.sin, torch.ones(2))),
        "expected a function of (params, *inputs), a module or a Rewrite, given a Trace: <Trace sin: 1 input, 1 equation, 1 "
        "output>\nUse `rewrites.identity(trace, names)` for a trace whose first inputs are parameters.",
    ),
    "adapters on codes": (
        lambda: tfn.lora(
            tfn.quantize(tfn.parameters.identity(tfn.trace(F.linear, *[torch.ones(2, 2)] * 2), ["", "w"]))
        ),
        "lora: there is no weight that is not stored as codes already (.scales, .values, w.scales, ...)\n"
        "A weight is quantised once, and has its adapter before that. To store it in another way, begin with `restored()` or the "
        "parameters.",
    ),
    "filter": (
        lambda: tfn.quantize(nn.Linear(3, 4), filter=3),
        "quantize: a filter is a pattern on names, some of them, or a function of (name, shape)",
    ),
    "sample": (
        lambda: tfn.quantize(nn.Linear(3, 4), "int8_static").calibrate([torch.ones(2, 3)]),
        "calibrate: a sample is the inputs of a call, given a Tensor\nWrite `[(x,), (y,)]`: a tuple for each call.",
    ),
    "parts": (
        lambda: tfn.quantize(nn.Linear(3, 4), own(lambda w: (w,))),
        "quantize: encode of the scheme own gives tensors by name, such as {'values': ...}, given a tuple",
    ),
    "in place": (
        lambda: tfn.quantize(nn.Linear(3, 4), own(lambda w: {"values": w.mul_(2)})),
        "quantize: encode of the scheme own changes the weight in place\nCompute the parts from it, or from a copy.",
    ),
}


def own(encode: Callable[[torch.Tensor], Any]) -> Scheme:
    """A scheme of a user's, whose encode is wrong."""
    return Scheme("own", encode, lambda parts, shape, dtype: parts["values"], torch.zeros_like)


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    make, text = BAD[name]
    with warnings.catch_warnings(action="ignore"), pytest.raises(RewriteError) as error:  # lazy modules warn
        make()
    assert message_of(error.value).startswith(text)
