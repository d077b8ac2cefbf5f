"""Kernels for linear layers on codes: they compute what the composites mean, where they are chosen."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F
from torch.torch_version import TorchVersion

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import MissingExtra
from thunder_fn.executors.quantized import kernels, packages
from thunder_fn.interpreters.quantize.eight_bits import (
    FP8,
    floats_of,
    fp8_dynamic_linear,
    int8_dynamic_linear,
    rounded_to_fp8,
)
from thunder_fn.parameters import SCHEMES

DTYPES = [torch.bfloat16, torch.float32]


def quantised(scheme: Any, rows: int, columns: int, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(rows * 1000 + columns)
    layer = torch.nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)
    return tfn.quantize(tfn.jit(layer, **options), scheme)


def program(module: Any) -> str:
    return str(tfn.last_traces(module)[-1])


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_a_kernel_computes_what_the_composite_means(scheme: str, data: st.DataObject) -> None:
    rows, columns = (
        data.draw(st.sampled_from([1, 5, 16, 48, 80])),
        data.draw(st.sampled_from([1, 7, 32, 64, 192, 256])),
    )
    count, dtype = data.draw(st.sampled_from([0, 1, 3, 8, 17, 40])), data.draw(st.sampled_from(DTYPES))
    q = quantised(scheme, rows, columns, dtype)
    x = torch.randn(count, 1, columns).to(dtype) * 10.0 ** data.draw(st.integers(-3, 3))
    if scheme == "int8_static":
        q.calibrate([(x,)])
    found, parts = q(x), q.parts()
    weight, bias = (q.state_dict()[name].double() for name in ("weight", "bias"))
    exact = F.linear(x.double(), weight, bias)
    noise = torch.finfo(dtype).eps * 4 * (x.double().abs() @ weight.abs().t() + bias.abs())
    if scheme == "int8_static" and count:
        noise = noise + (x.double().abs().amax() / 254).expand(x.shape) @ weight.abs().t()
    if "dynamic" in scheme:  # half a step of each activation, or of its last of three places
        amax = x.double().abs().amax(-1, keepdim=True) if count else x.double()
        off = amax / 254 if scheme == "int8_dynamic" else x.double().abs() * 2**-4 + amax * 2**-18
        noise = noise + off.expand(x.shape) @ weight.abs().t()
    assert found.dtype == dtype and bool(((found.double() - exact).abs() <= noise + 1e-30).all()), parts


@pytest.mark.parametrize(
    ("scheme", "dtype", "count", "kernel"),
    [
        ("int8", torch.bfloat16, 1, "weight_int8pack_mm"),
        ("int8_dynamic", torch.float32, 5, "_int_mm"),
        ("int4", torch.bfloat16, 3, "weight_int4pack_mm_for_cpu"),
    ],
)
def test_where_a_kernel_is_chosen(scheme: str, dtype: torch.dtype, count: int, kernel: str) -> None:
    if scheme == "int4" and kernels.kernel_block() is None:
        pytest.skip("PyTorch's int4 weights lie in another way on this processor: kernel_block() is None")
    q, x = quantised(scheme, 64, 256, dtype, executors=["quantized"]), torch.randn(count, 256).to(dtype)
    q(x)
    assert kernel in program(q)
    plain = quantised(scheme, 64, 256, dtype, executors=["torch"])
    plain(x)
    assert kernel not in program(plain)
    torch.testing.assert_close(q(x), plain(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activations_that_are_no_numbers_give_none(scheme: str) -> None:
    q, x = quantised(scheme, 16, 64, torch.float32), torch.randn(3, 64)
    if scheme == "int8_static":
        q.calibrate([(x,)])
    x[1, 5] = float("nan")
    assert q(x).isnan().all(1).tolist() == [False, True, False]


def test_many_rows_and_bitwise_numerics_have_the_weight_decoded() -> None:
    for q, count in (
        (quantised("int8", 64, 256, torch.bfloat16), 9),
        (quantised("int8", 64, 256, torch.bfloat16, numerics="bitwise"), 1),
    ):
        q(torch.randn(count, 256).bfloat16())
        assert "weight_int8pack_mm" not in program(q)


def test_gradients_go_through_what_a_kernel_means() -> None:
    for scheme in ("int8", "int4", "nf4", "int8_dynamic"):
        q = quantised(scheme, 32, 64, torch.bfloat16)
        x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
        q(x).sum().backward()
        torch.testing.assert_close(x.grad, q.state_dict()["weight"].sum(0).expand(2, 64), rtol=0.02, atol=0.02)


def test_the_choices_for_cuda_are_functions_of_types() -> None:
    x, few = torch.empty(32, 64, device="meta"), torch.empty(2, 64, device="meta")
    w, scales = torch.empty(16, 64, device="meta", dtype=torch.int8), torch.empty(16, device="meta")
    assert not kernels.suits_int8(x, w, scales) and not kernels.suits_scaled_mm(few, w, scales)


def test_products_of_integers_and_of_eight_bit_floats_are_what_the_composites_mean() -> None:
    for scheme, kernel, composite in (
        ("int8_dynamic", kernels.int_mm_linear, int8_dynamic_linear),
        ("fp8_dynamic", kernels.scaled_mm_linear, fp8_dynamic_linear),
    ):
        parts = SCHEMES[scheme].encode(torch.randn(32, 64))
        if scheme == "fp8_dynamic" and TorchVersion(torch.__version__) < "2.12":
            continue  # its `_scaled_mm` on a CPU knows one scale for all rows only
        x, bias = torch.randn(3, 2, 64), torch.randn(32)
        found = kernel(x, parts["values"], parts["scales"], bias)
        torch.testing.assert_close(found, composite(x, parts["values"], parts["scales"], bias), rtol=1e-4, atol=1e-4)


# ---- bitsandbytes and torchao ----

HAS_BITSANDBYTES, HAS_TORCHAO = (importlib.util.find_spec(name) is not None for name in ("bitsandbytes", "torchao"))


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_without_the_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as error:
        packages.imported(package)
    assert message_of(error.value) == (
        f"the executor {package} needs {package}, which is not installed\n"
        f'Install it with `pip install "thunder_fn[{package}]"`.'
    )


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 5])
def test_torchao(count: int) -> None:
    q, x = quantised("int8_dynamic", 48, 64, torch.float32, executors=["torchao"]), torch.randn(count, 2, 64)
    found = q(x)
    assert "int8_dynamic(" in program(q)
    torch.testing.assert_close(found, quantised("int8_dynamic", 48, 64, torch.float32)(x))


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_bitsandbytes(dtype: torch.dtype, count: int) -> None:
    q = quantised("nf4", 64, 256, dtype, executors=["bitsandbytes"])
    x = torch.randn(count, 256).to(dtype)
    found = q(x)
    assert "nf4_matmul(" in program(q)
    expected = F.linear(x, q.state_dict()["weight"], q.state_dict()["bias"])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_eight_bit_floats_are_read_from_their_bits() -> None:
    every = torch.arange(256).to(torch.uint8).view(FP8)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        numbers = every.to(dtype)
        assert torch.equal(floats_of(every, dtype)[~numbers.isnan()], numbers[~numbers.isnan()])


def test_rounding_to_e4m3_is_that_of_pytorch() -> None:
    """The numbers that there are, those halfway between, their neighbours, and some others."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    own = every[every.isfinite()].sort().values
    x = torch.cat([own, (own[1:] + own[:-1]) / 2, torch.linspace(-448, 448, 999), torch.randn(999) / 99])
    x = torch.cat([x, x.nextafter(torch.tensor(1e9)), x.nextafter(torch.tensor(-1e9))])
    assert torch.equal(rounded_to_fp8(x).view(torch.int32), x.to(FP8).float().view(torch.int32))
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert bool(rounded_to_fp8(nan).isnan().all())


def test_activations_of_one_feature_are_multiplied_as_the_composite_means() -> None:
    """PyTorch's `_int_mm` of one column reads what is not there."""
    x = torch.randn(4, 1)
    for scheme, executors in (("int8_static", None), ("int8_dynamic", ["quantized", "torch"])):
        fast, plain = (
            quantised(scheme, 33, 1, torch.float32, executors=executors),
            quantised(scheme, 33, 1, torch.float32, executors=["torch"]),
        )
        if scheme == "int8_static":
            fast.calibrate([(x,)])
            plain.calibrate([(x,)])
        torch.testing.assert_close(fast(x), plain(x))
