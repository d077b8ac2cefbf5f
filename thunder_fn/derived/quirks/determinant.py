"""The gradient of a determinant, with a derivative for every matrix.

PyTorch's gradient solves with the matrix, which is undefined for a singular one; the one that it
differentiates again has factors of an SVD, whose derivatives divide by the distances of singular
values. Both are cofactors, which are polynomials. With A = u s v, c = det(u) det(v) and F = u' E v'
(a prime is the conjugate transpose):

    cofactor(A)            = conj(c) u diag(product of the other s) v
    its derivative along E = conj(c) u M' v
        M_ii = sum_k F_kk P_ik,  M_ij = -F_ij P_ij,  P_ij = product of the s but i and j;  P_ii = 0

The derivative is its own transpose, as a second derivative. A further one is that of the SVD.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define("det(Tensor A) -> Tensor")
_library.define("det_gradient(Tensor gradient, Tensor A, Tensor det, Tensor cotangent) -> Tensor")
_library.define("cofactor(Tensor A) -> Tensor")
_library.define("cofactor_tangent(Tensor A, Tensor tangent) -> Tensor")

DET = "aten._linalg_det.default"


def _products(s: Tensor) -> tuple[Tensor, Tensor]:
    """The products of all values but one, [..., n], and of all but two, [..., n, n], by products of
    what stands before, between and behind them.
    """
    n = s.shape[-1]
    one = s.new_ones(*s.shape[:-1], 1)
    before = torch.cat([one, s], -1).cumprod(-1)[..., :n]
    behind = torch.cat([one, s.flip(-1)], -1).cumprod(-1)[..., :n].flip(-1)
    later = torch.ones(n, n, dtype=torch.bool, device=s.device).triu(1)
    runs = torch.where(later, s[..., None, :], 1.0).cumprod(-1)  # of i+1 to j
    between = torch.cat([one[..., None].expand(*s.shape, 1), runs], -1)[..., :n]  # of i+1 to j-1
    pairs = torch.where(later, before[..., :, None] * between * behind[..., None, :], 0.0)
    return before * behind, pairs + pairs.mT


def _factors(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    u, s, v = torch.linalg.svd(A)
    sign = (torch.linalg.det(u) * torch.linalg.det(v)).conj()
    return u, s, v, sign[..., None, None]


def cofactor(A: Tensor) -> Tensor:
    """The conjugate cofactors: what autograd calls the gradient of the determinant."""
    u, s, v, sign = _factors(A)
    return sign * (u * _products(s)[0][..., None, :]) @ v


def det_gradient(gradient: Tensor, A: Tensor, det: Tensor, cotangent: Tensor) -> Tensor:
    """The gradient that autograd has computed by solving with the matrix; the cofactors where the
    determinant is zero. Autograd multiplies by the determinant, so its gradient is zero there.
    """
    is_singular = (det == 0)[..., None, None]
    if not is_singular.any():
        return gradient.clone()
    return torch.where(is_singular, cotangent[..., None, None] * cofactor(A), gradient)


def cofactor_tangent(A: Tensor, tangent: Tensor) -> Tensor:
    """The derivative of the cofactors along a tangent."""
    u, s, v, sign = _factors(A)
    pairs = _products(s)[1].to(A.dtype)
    inner = u.mH @ tangent @ v.mH
    on_diagonal = (pairs @ inner.diagonal(dim1=-2, dim2=-1)[..., None])[..., 0]
    moved = torch.diag_embed(on_diagonal) - inner * pairs
    return sign * u @ moved.mH @ v


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pull_det(ctx: Any, grad: Tensor) -> Tensor:
    return grad[..., None, None] * torch.ops.thunder_fn.cofactor(*ctx.saved_tensors)


def _pull_cofactor(ctx: Any, grad: Tensor) -> Tensor:
    return torch.ops.thunder_fn.cofactor_tangent(*ctx.saved_tensors, grad)


def _pull_cofactor_tangent(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    A, tangent = ctx.saved_tensors
    of_tangent = torch.ops.thunder_fn.cofactor_tangent(A, grad) if ctx.needs_input_grad[1] else None
    if not ctx.needs_input_grad[0]:
        return None, of_tangent
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        own = A.view_as(A)
        result = cofactor_tangent(own, tangent)
    return torch.autograd.grad(result, own, grad, create_graph=again)[0], of_tangent


def _batched(op: Any) -> Any:
    def run(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        moved = [
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip(tensors, in_dims, strict=True)
        ]
        return op(*moved), 0

    return run


for _name, _run, _fake, _pull in (
    ("det", torch.linalg.det, lambda A: A.new_empty(A.shape[:-2]), _pull_det),
    ("det_gradient", det_gradient, lambda gradient, A, det, cotangent: A.new_empty(A.shape), None),
    ("cofactor", cofactor, lambda A: A.new_empty(A.shape), _pull_cofactor),
    (
        "cofactor_tangent",
        cofactor_tangent,
        lambda A, tangent: A.new_empty(A.shape),
        _pull_cofactor_tangent,
    ),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _qualified = f"thunder_fn::{_name}"
    torch.library.register_fake(_qualified, _fake, lib=_library)
    if _pull is not None:
        torch.library.register_autograd(_qualified, _pull, setup_context=_save, lib=_library)
    _op = getattr(torch.ops.thunder_fn, _name)
    torch.library.register_vmap(_qualified, _batched(_op), lib=_library)
