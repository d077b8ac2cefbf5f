"""Linear layers on codes by Triton: one launch each, as exact as their dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.executors.quantized import codes_kernels, codes_triton
from thunder_fn.parameters.schemes import scheme_named

SCHEMES = ("int8", "fp8", "fp8_tensor", "int4", "nf4")
EXACT = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of float64 sums over decoded weights, relative to the sum of the sizes: what rounding activations, weights and
results to the dtype may add.
"""


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shape", [(1, 130), (1, 64), (3, 130), (40, 64)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_near_float64(scheme: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows and columns that fill no block; the gradient of the activations, which decodes the weights again."""
    layer = nn.Linear(shape[1], 70, dtype=dtype, device="cuda")
    run = tfn.quantize(tfn.jit(copy.deepcopy(layer)), scheme)
    x = torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)
    claims = tfn.explain_claims(run, x)
    assert "codes" in {one.taken_by for one in claims.forward}
    assert scheme not in ("int4", "nf4") or "codes" in {one.taken_by for one in claims.backward}
    found = run(x)
    (grad,) = torch.autograd.grad(found.sum(), x)
    own, weight = scheme_named(scheme), layer.weight.detach().cpu()
    w = own.decode(own.encode(weight), (70, shape[1]), torch.float32).double().cuda()
    b, wide = layer.bias.detach().double(), x.detach().double()
    near = lambda mine, wanted, size: ((mine.double() - wanted).abs() / size).max() < EXACT[dtype]
    assert found.dtype == dtype and near(found, wide @ w.t() + b, wide.abs() @ w.abs().t() + b.abs())
    assert near(grad, w.sum(0).expand(shape), w.abs().sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (20, 66), (2, 9, 64)])
@pytest.mark.parametrize("scheme", ["int8_dynamic", "fp8_dynamic"])
def test_activations_are_rounded_as_the_composite_says(scheme: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """In one launch, to the bit; a row with an infinity or NaN is NaN, others know nothing of it."""
    layer = nn.Linear(shape[-1], 48, dtype=dtype, device="cuda")
    run = tfn.quantize(tfn.jit(layer), scheme)
    plain = tfn.quantize(tfn.jit(layer, executors=["torch"]), scheme)
    x = torch.randn(shape, dtype=dtype, device="cuda")
    for bad in (0.0, float("inf"), float("nan")):
        x.view(-1)[7] = bad
        with torch.no_grad():
            found, wanted = run(x), plain(x)
        assert "codes" in {one.taken_by for one in tfn.explain_claims(run, x).forward}
        wide = EXACT[dtype] * wanted.nan_to_num().abs().max().item() * 4
        torch.testing.assert_close(found, wanted, rtol=0, atol=wide, equal_nan=True)
        assert found.isnan().all(-1).sum() == (bad != 0)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", EXACT)
def test_codes_of_activations(dtype: torch.dtype, kind: torch.dtype) -> None:
    """Rows of zeros, tiny and huge numbers, and ties, beside PyTorch's own rounding."""
    tiny, huge = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    rows = [torch.zeros(70), torch.randn(70) * tiny, torch.full((70,), huge), torch.arange(70) - 20.5, torch.randn(70)]
    x = torch.stack(rows).to(dtype).cuda()
    x[3, 0] = 127.0 if kind == torch.int8 else 448.0  # the step is one: halves are ties
    like = codes_kernels._int8_rows if kind == torch.int8 else codes_kernels._fp8_rows
    for mine, wanted in zip(codes_triton.rounded(x, kind), like(x), strict=True):
        torch.testing.assert_close(mine.float(), wanted.float(), rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_programs_share_the_columns_of_long_rows(count: int, scheme: str) -> None:
    """Split long rows of few weights in shares, of which the last is shorter."""
    columns = 9 * 1024 + 64
    assert codes_triton._shares(torch.device("cuda", 0), 3, columns, 128)[0] > 4
    layer, x = nn.Linear(columns, 35, device="cuda"), torch.randn(count, columns, device="cuda")
    run, plain = (tfn.quantize(tfn.jit(layer, executors=names), scheme) for names in ([], ["torch"]))
    with torch.no_grad():
        torch.testing.assert_close(run(x), plain(x), rtol=1e-4, atol=1e-4)
