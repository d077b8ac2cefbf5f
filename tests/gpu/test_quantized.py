"""Linear layers on codes by Triton: one launch each, as exact as their dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import thunder_fn as tfn
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
