"""The executor codes: products with codes that are decoded where they are multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.executors.quantized import codes_cpp, codes_kernels
from thunder_fn.executors.torchinductor.codegen import Kernel
from thunder_fn.executors.torchinductor.compiling import Failed, functions_of_kernels
from thunder_fn.parameters import SCHEMES, int4

DECODED = ("int8", "fp8", "fp8_tensor", "nf4", "int4")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def quantised(scheme: str, rows: int, columns: int, dtype: torch.dtype, bias: bool = True, **options: Any) -> Any:
    layer = nn.Linear(columns, rows, bias, dtype=dtype).requires_grad_(False)
    return tfn.quantize(tfn.jit(layer, **options), scheme)


def program(module: Any) -> str:
    return str(tfn.last_traces(module)[-1])


def off(found: torch.Tensor, state: dict[str, torch.Tensor], x: torch.Tensor) -> float:
    """The distance of a linear layer from the exact one of its state, in units of the greatest result."""
    exact = F.linear(x.double(), *(value.double() for value in state.values()))
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1)) if x.numel() else 0.0


@pytest.mark.parametrize("scheme", DECODED)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 5),
    count=st.integers(0, 12) | st.integers(30, 40),
    dtype=st.sampled_from(list(TOLERANCE)),
    bias=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_kernels_compute_what_the_composites_mean(
    scheme: str, rows: int, blocks: int, count: int, dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(rows)
    q, x = quantised(scheme, rows, 64 * blocks, dtype, bias), torch.randn(count, 1, 64 * blocks).to(dtype)
    found = q(x)
    assert found.dtype == dtype and off(found, q.state_dict(), x) <= TOLERANCE[dtype]


PORTABLE = [(codec, torch.float32) for codec in codes_cpp.CODECS] + [
    (codec, torch.bfloat16) for codec in ("int8", "nf4", "int4")
]


@pytest.mark.parametrize(("codec", "dtype"), PORTABLE)
def test_kernels_for_any_processor(codec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {
        one: tuple(make(one[0], codes_kernels.NUMBERS[one[1]], True) for make in (codes_cpp.product, codes_cpp.weights))
        for one in PORTABLE
    }
    compiled = functions_of_kernels(tuple(kernel for pair in pairs.values() for kernel in pair))
    assert not isinstance(compiled, Failed), compiled.reason
    monkeypatch.setattr(
        codes_kernels, "functions", lambda *asked: tuple(compiled[kernel.key] for kernel in pairs[asked])
    )
    q = quantised(codec, 37, 192, dtype)
    for count in (1, 5, 33):
        x = torch.randn(count, 192).to(dtype)
        found = q(x)
        assert off(found, q.state_dict(), x) <= TOLERANCE[dtype] and "by codes" in program(q)


@pytest.mark.parametrize("scheme", [SCHEMES["int8"], int4(32), int4(64), int4(256)])
@given(seed=st.integers(0, 99), spread=st.floats(0, 12), size=st.integers(-30, 30), count=st.integers(1, 8))
@settings(max_examples=5, deadline=None)
def test_integers_lose_what_floats_do(scheme: Any, seed: int, spread: float, size: int, count: int) -> None:
    """Activations of any size beside each other: off by a part in 2 ** 22 of the greatest, beside what rounding results takes."""
    generator, shape = torch.Generator().manual_seed(seed), (37, 256 + 64 * (seed % 2))
    for dtype, places in ((torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-8)):
        q = quantised(scheme, *shape, dtype, bias=False)
        sizes = 10.0 ** (size + spread * torch.rand(shape[1], generator=generator))
        x = (torch.randn(count, shape[1], generator=generator) * sizes).to(dtype)
        parts = {name.removeprefix("weight."): value for name, value in q.parts().items()}
        w, each = scheme.decode(parts, shape, torch.float32).double(), x.double()
        exact, most = each @ w.t(), w.abs().amax(1)
        lost = each.abs().amax(1, keepdim=True) * 2.0**-22 * w.abs().sum(1)
        reach = each.abs().sum(1, keepdim=True) * most * 2.0**-20
        assert bool(((q(x).double() - exact).abs() <= exact.abs() * places + lost + reach).all())


def test_what_is_no_number_stays_so() -> None:
    q, x = quantised("int8", 19, 64, torch.float32), torch.ones(3, 64)
    x[0, 5], x[1, 7] = float("inf"), float("nan")
    found, expected = q(x), q.restored()(x)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(q(torch.zeros(1, 64)), q.state_dict()["bias"].unsqueeze(0))


@pytest.mark.parametrize("scheme", DECODED)
def test_weights_that_lie_column_by_column(scheme: str) -> None:
    layer = nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
    x, plain = torch.randn(2, 64).bfloat16(), tfn.quantize(tfn.jit(layer), scheme)
    layer.weight.data = layer.weight.t().contiguous().t()
    assert torch.equal(tfn.quantize(tfn.jit(layer), scheme)(x), plain(x))


@pytest.mark.parametrize("scheme", DECODED)
def test_weights_are_decoded_to_the_bit(scheme: str) -> None:
    """An op without a rule sees what `restore` gives."""
    conv = nn.Conv2d(16, 8, 4).requires_grad_(False)
    q, x = tfn.quantize(tfn.jit(conv), scheme), torch.randn(2, 16, 6, 6)
    assert torch.equal(q(x), q.restored()(x))
    assert "by codes" in program(q)


@pytest.mark.parametrize("scheme", DECODED)
def test_where_a_kernel_runs(scheme: str) -> None:
    for shape, columns, expected in (((1, 128), 128, True), ((9, 128), 128, True), ((2, 60), 60, False)):
        q = quantised(scheme, 5, columns, torch.float32)
        q(torch.randn(shape))
        assert (f"quantized.{scheme[:4].rstrip('_')}_linear as codes" in program(q)) == expected
    for options in ({"numerics": "bitwise"}, {"executors": ["torch"]}):
        q = quantised(scheme, 5, 128, torch.float32, **options)
        q(torch.randn(1, 128))
        assert "codes" not in program(q)


@pytest.mark.parametrize("scheme", DECODED)
def test_without_a_compiler_the_weight_is_decoded(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes_kernels.functions.cache_clear()
    monkeypatch.setattr(codes_kernels, "functions_of_kernels", lambda kernels: Failed("no compiler"))
    q, x = quantised(scheme, 5, 64, torch.float32), torch.randn(2, 64)
    torch.testing.assert_close(q(x), F.linear(x, q.state_dict()["weight"], q.state_dict()["bias"]))
    assert "codes" not in program(q)
    codes_kernels.functions.cache_clear()


def test_a_machine_without_a_compiler_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor, which is asked for one, raises."""

    def asked(source: Any, target: Any) -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("thunder_fn.torch_internals.inductor.build_command", asked)
    found = functions_of_kernels((Kernel((), 'extern "C" void kernel() { int nobody_compiles_this; }'),))
    assert isinstance(found, Failed) and found.reason.startswith("RegionError: no C++ compiler: No working C++")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_keeps_no_decoded_weight(scheme: str) -> None:
    """Gradients are those of the composites; forward and backward run on the codes, each by itself."""
    q = tfn.quantize(tfn.jit(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))), scheme)
    x, kept = torch.randn(40, 64, requires_grad=True), list[torch.Tensor]()
    if scheme == "int8_static":
        q.calibrate([(x.detach(),)])
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        y = q(x)
    assert not any(value.numel() >= 64 * 128 and value.itemsize > 1 for value in kept)
    y.square().sum().backward()
    state, seen = q.restored().requires_grad_(False), x.detach().requires_grad_()
    state(seen).square().sum().backward()
    torch.testing.assert_close(x.grad, seen.grad, rtol=0.1, atol=0.05 if "_" in scheme else 1e-4)


def test_kernels_run_in_loops_and_branches() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.end = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = tfn.scan(lambda c, i: (torch.tanh(self.step(c)), i), x, torch.arange(3))
            return tfn.cond(x.sum() > 0, self.end, lambda v: -self.end(v), (x,))

    q, x = tfn.quantize(tfn.jit(Steps()), "int8"), torch.randn(2, 64)
    torch.testing.assert_close(q(x), q.restored()(x), rtol=1e-4, atol=1e-5)
    assert program(q).count("by codes") == 3
