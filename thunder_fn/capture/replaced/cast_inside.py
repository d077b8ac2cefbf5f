"""Functions without an autocast rule whose kernels call ops that have one.

Autocast is on inside such a kernel, so eager PyTorch casts there: `linalg.pinv` of float32 gives
bfloat16. No mode of the dispatcher sees these calls. Under autocast a capture runs the function in
terms of the ops that its kernel calls, bitwise.

Source: ATen's BatchLinearAlgebra, AffineGridGenerator and Linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals

Tensor = torch.Tensor


def _pinv(
    A: Tensor, *thresholds: Any, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> Tensor:
    real = A.dtype.to_real()
    if thresholds or A.numel() == 0:  # the deprecated `rcond`
        return NotImplemented
    number = lambda value: value if isinstance(value, Tensor) else A.new_full((), value, dtype=real)
    zero = number(0.0)
    if rtol is None:
        rtol = number(torch.finfo(real).eps * max(A.shape[-2:]))
        rtol = rtol if atol is None else torch.where(number(atol) > 0, zero, rtol)
    atol, rtol = number(0.0 if atol is None else atol), number(rtol)

    def inverse(values: Tensor, largest: Tensor) -> Tensor:
        least = torch.maximum(atol.unsqueeze(-1), rtol.unsqueeze(-1) * largest)
        return torch.where(values.abs() > least, values.reciprocal(), zero).to(A.dtype)

    if hermitian:
        values, vectors = torch.linalg.eigh(A)
        largest = values.abs().amax(-1, keepdim=True)
        return (vectors * inverse(values, largest).unsqueeze(-2)) @ vectors.mH
    u, values, vh = torch.linalg.svd(A, full_matrices=False)
    return (vh.mH * inverse(values, values.narrow(-1, 0, 1)).unsqueeze(-2)) @ u.mH


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    batch, _, *spatial = size

    def coordinate(dim: int, length: int) -> Tensor:
        if length <= 1:
            steps = theta.new_zeros(length)
        else:
            steps = torch.linspace(-1, 1, length, dtype=theta.dtype, device=theta.device)
            steps = steps if align_corners else steps * (length - 1) / length
        return steps.reshape([-1 if dim == at else 1 for at in range(len(spatial))])

    columns = [coordinate(dim, length) for dim, length in enumerate(spatial)][::-1]
    columns.append(theta.new_ones([1] * len(spatial)))
    base = torch.stack([column.expand(spatial) for column in columns], -1)
    points = base.reshape(1, -1, len(columns)).expand(batch, -1, -1)
    return torch.bmm(points, theta.mT).view(batch, *spatial, len(spatial))


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    first, second = (x.reshape(-1, x.shape[-1]) for x in (input1, input2))
    columns = [
        torch.bmm((first @ matrix).unsqueeze(1), second.unsqueeze(2)).reshape(-1)
        for matrix in weight.unbind()
    ]
    result = torch.stack(columns, -1).to(input1.dtype)
    result = result.reshape(*input1.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


def _under_autocast(original: Any, parts: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parts)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = parts(*args, **kwargs) if internals.is_autocast_on() else NotImplemented
        return original(*args, **kwargs) if result is NotImplemented else result

    return run


CAST_INSIDE: dict[Any, Callable[..., Any]] = {
    function: _under_autocast(function, parts)
    for function, parts in (
        (torch.linalg.pinv, _pinv),
        (torch.affine_grid_generator, _affine_grid),
        (torch.bilinear, _bilinear),
    )
}
"""The functions as a capture runs them."""
