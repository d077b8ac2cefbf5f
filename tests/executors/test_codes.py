"""The executor codes: products with codes, decoded in registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.executors.compiled.compiling import Failed
from thunder_fn.rewrites import codes_kernels

SCHEMES = ("int8", "fp8", "fp8_tensor", "nf4", "int4")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def quantised(scheme: str, rows: int, columns: int, dtype: torch.dtype, bias: bool = True) -> Any:
    layer = nn.Linear(columns, rows, bias, dtype=dtype).requires_grad_(False)
    return tfn.quantize(tfn.jit(layer, executors=["codes"]), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 5),
    count=st.integers(1, 8),
    dtype=st.sampled_from(list(TOLERANCE)),
    bias=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_kernels_compute_what_the_composites_mean(
    scheme: str, rows: int, blocks: int, count: int, dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(rows)
    q, x = quantised(scheme, rows, 64 * blocks, dtype, bias), torch.randn(count, 1, 64 * blocks).to(dtype)
    state = {name: value.double() for name, value in q.state_dict().items()}
    expected = F.linear(x.double(), state["weight"], state.get("bias"))
    off = (q(x).double() - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert float(off) <= TOLERANCE[dtype]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_where_a_kernel_runs(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[int]()
    compiled = codes_kernels.functions_of_kernels
    monkeypatch.setattr(codes_kernels, "functions_of_kernels", lambda kernels: ran.append(1) or compiled(kernels))
    for shape, columns, expected in (((1, 128), 128, 1), ((9, 128), 128, 0), ((0, 128), 128, 0), ((2, 60), 60, 0)):
        ran.clear()
        quantised(scheme, 5, columns, torch.float32)(torch.randn(shape))
        assert len(ran) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_a_compiler_the_weight_is_decoded(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_kernels, "functions_of_kernels", lambda kernels: Failed("no compiler"))
    q, x = quantised(scheme, 5, 64, torch.float32), torch.randn(2, 64)
    torch.testing.assert_close(q(x), F.linear(x, q.state_dict()["weight"], q.state_dict()["bias"]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_composites(scheme: str) -> None:
    q, x = quantised(scheme, 5, 64, torch.float32), torch.randn(2, 64, requires_grad=True)
    q(x).square().sum().backward()
    seen = x.detach().requires_grad_()
    F.linear(seen, q.state_dict()["weight"], q.state_dict()["bias"]).square().sum().backward()
    torch.testing.assert_close(x.grad, seen.grad, rtol=1e-4, atol=1e-4)
