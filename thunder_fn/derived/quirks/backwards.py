"""Fused ops and backwards that PyTorch has no derivative of, in terms of other ops.

Most are derivatives of the op of which they are the backward, written with plain ops.
`decompositions.py` has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def pulled(f: Callable[..., Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """The vjp of f at x, which can be differentiated again."""
    with torch.enable_grad():
        return torch.func.vjp(f, x)[1](grad)[0]


def distances(a: Tensor, b: Tensor, p: float) -> Tensor:
    """The distances between the rows of a and those of b; where two are equal the gradient is
    zero.
    """
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, dim=-1)


def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    """The gradient of the distances between two sets of points in the first, one for each pair
    of batches.
    """
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    if any(isinstance(size, int) and size == 0 for size in (*batch, *x1.shape[-2:], x2.shape[-2])):
        return torch.zeros_like(x1)  # as the op, which then sees no batches
    grad = grad.reshape(*batch, x1.shape[-2], x2.shape[-2])  # it may have a batch of one more
    return pulled(lambda x: distances(x, x2, p), x1.expand(*batch, *x1.shape[-2:]), grad)


def pdist_backward(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor:
    """The gradient of the distances between points."""
    first, second = torch.triu_indices(len(self), len(self), 1, device=self.device)
    return pulled(lambda x: torch.linalg.vector_norm(x[first] - x[second], p, dim=-1), self, grad)


def reduced(losses: Tensor, reduction: int) -> Tensor:
    """One loss for each example, or their mean or sum, by ATen's number of the reduction."""
    return (losses, losses.mean(), losses.sum())[reduction] if reduction else losses


def _hinge(x: Tensor) -> Tensor:
    """The positive part. Its gradient at 0 is zero, as in PyTorch's kernels."""
    return torch.where(x > 0, x, 0)


def multi_margin_loss(
    self: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """The hinge of each wrong class's distance to the right one."""
    rows, label = torch.atleast_2d(self), target.reshape(-1, 1)
    hinge = _hinge(margin - rows.gather(1, label) + rows) ** p
    hinge = hinge.scatter(1, label, 0)
    hinge = hinge if weight is None else hinge * weight[label]
    losses = (hinge.sum(1) / rows.shape[1]).reshape(target.shape)
    return reduced(losses, int(reduction))


def multi_margin_loss_backward(grad: Tensor, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The gradient of the hinges. PyTorch's meta function gives the loss of one row a dim of 1."""
    size = multi_margin_loss(self, *args, **kwargs).shape
    return pulled(lambda x: multi_margin_loss(x, *args, **kwargs), self, grad.reshape(size))


def _multilabel_margins(x: Tensor, target: Tensor, is_target: Tensor, reduction: int) -> Tensor:
    """The hinges between every right class and every wrong one. Labels end at the first negative
    one.
    """
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    right = rows.gather(1, labels.clamp_min(0)).unsqueeze(2)
    hinge = _hinge(1 - right + rows.unsqueeze(1))
    counted = _given(labels).unsqueeze(2) & (torch.atleast_2d(is_target) == 0).unsqueeze(1)
    losses = torch.where(counted, hinge, 0).sum((1, 2)) / rows.shape[1]
    return reduced(losses if x.dim() == 2 else losses[0], int(reduction))


def _given(labels: Tensor) -> Tensor:
    return (labels >= 0).int().cumprod(1).bool()


def multilabel_margin_loss_forward(
    self: Tensor, target: Tensor, reduction: int
) -> tuple[Tensor, Tensor]:
    """PyTorch's decomposition is wrong where labels differ in number."""
    labels = torch.atleast_2d(target)
    classes = torch.arange(labels.shape[1], device=labels.device)
    is_target = ((labels.unsqueeze(2) == classes) & _given(labels).unsqueeze(2)).any(1)
    is_target = is_target.to(self.dtype).reshape(target.shape)
    return _multilabel_margins(self, target, is_target, reduction), is_target


def multilabel_margin_loss_backward(
    grad: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    """The gradient of the hinges."""
    return pulled(lambda x: _multilabel_margins(x, target, is_target, reduction), self, grad)


def weight_norm_interface_backward(
    grad: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """The gradient of `v * g / norm(v)`; the saved norms are those of v."""
    dims = [i for i in range(saved_v.dim()) if i != dim]

    def normed(v: Tensor, g: Tensor) -> Tensor:
        return v * (g / torch.linalg.vector_norm(v, 2, dims, keepdim=True))

    with torch.enable_grad():
        of_v, of_g = torch.func.vjp(normed, saved_v, saved_g)[1](grad)
    return of_v, of_g


def glu_jvp(glu: Tensor, x: Tensor, dx: Tensor, dim: int) -> Tensor:
    """The derivative of `a * sigmoid(b)` along dx, where a and b are the halves of x."""
    a, b = x.chunk(2, dim)
    da, db = dx.chunk(2, dim)
    gate = b.sigmoid()
    return da * gate + a * gate * (1 - gate) * db


def glu_backward_jvp(
    grad_x: Tensor, grad: Tensor, x: Tensor, dgrad: Tensor, dx: Tensor, dim: int
) -> Tensor:
    """The derivative of its gradient, `grad * gate` and `grad * a * gate'`, along dgrad and dx."""
    a, b = x.chunk(2, dim)
    da, db = dx.chunk(2, dim)
    gate = b.sigmoid()
    slope = gate * (1 - gate)
    of_a = dgrad * gate + grad * slope * db
    of_b = (dgrad * a + grad * da + grad * a * (1 - 2 * gate) * db) * slope
    return torch.cat([of_a, of_b], dim)


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """The gradient of sums, means or maxima of rows in the table."""
    if sparse:
        return NotImplemented
    zeros = grad.new_zeros((num_weights, grad.shape[1]))
    if mode == 2:
        # CUDA's kernel has the size of one bag more, with `include_last_offset`.
        empty = (bag_size[: grad.shape[0]] == 0).unsqueeze(1)
        return zeros.scatter_add(
            0, torch.where(empty, 0, maximum_indices), grad.masked_fill(empty, 0)
        )
    rows = grad[_bags(indices, offsets)]
    if mode == 1:
        rows = rows / bag_size[_bags(indices, offsets)].clamp_min(1).unsqueeze(1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    if scale_grad_by_freq:
        counts = indices.new_zeros(num_weights).index_add(0, indices, torch.ones_like(indices))
        rows = rows / counts[indices].unsqueeze(1)
    return zeros.index_add(0, indices, rows.masked_fill((indices == padding_idx).unsqueeze(1), 0))


def _bags(indices: Tensor, offsets: Tensor) -> Tensor:
    """The bag that each index is in."""
    positions = torch.arange(len(indices), device=indices.device)
    return (positions.unsqueeze(1) >= offsets).sum(1) - 1


def per_sample_weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Tensor:
    """The gradient of sums of rows in their weights."""
    found = (grad[_bags(indices, offsets)] * weight[indices]).sum(1)
    return found.masked_fill(indices == padding_idx, 0)


_STARTS = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf")}
"""The value that each reduction of runs begins with."""


def segment_reduce_backward(
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    initial: Any = None,
) -> Any:
    """The gradient of reductions of runs along an axis; the extreme ones share it where they are
    equal.
    """
    if lengths is not None:
        ends = lengths.cumsum(-1)
        starts = ends - lengths
    elif offsets is not None:
        starts, ends = offsets[..., :-1], offsets[..., 1:]
    else:
        return NotImplemented
    positions = torch.arange(data.shape[axis], device=data.device)
    inside = (positions >= starts.unsqueeze(-1)) & (positions < ends.unsqueeze(-1))
    inside = inside[(..., *[None] * (data.dim() - axis - 1))]  # *before, segments, length, *after
    start = _STARTS[reduce] if initial is None else float(initial)

    def segments(x: Tensor) -> Tensor:
        outside = start if reduce in ("max", "min") else float(reduce == "prod")
        parts = torch.where(inside, x.unsqueeze(axis), outside)
        match reduce:
            case "sum":
                return parts.sum(axis + 1) + start
            case "mean":
                count, total = inside.sum(axis + 1), parts.sum(axis + 1) + start
                return torch.where(count > 0, total / count.clamp_min(1), start)
            case "prod":
                return parts.prod(axis + 1) * start
            case "max":
                return parts.amax(axis + 1).clamp_min(start)
            case _:
                return parts.amin(axis + 1).clamp_max(start)

    return pulled(segments, data, grad)


BACKWARDS: dict[str, Callable[..., Any]] = {
    "aten._cdist_backward.default": cdist_backward,
    "aten._embedding_bag_backward.default": embedding_bag_backward,
    "aten._embedding_bag_per_sample_weights_backward.default": per_sample_weights_backward,
    "aten._pdist_backward.default": pdist_backward,
    "aten._segment_reduce_backward.default": segment_reduce_backward,
    "aten.multi_margin_loss.default": multi_margin_loss,
    "aten.multi_margin_loss_backward.default": multi_margin_loss_backward,
    "aten.multilabel_margin_loss_forward.default": multilabel_margin_loss_forward,
    "aten.multilabel_margin_loss_backward.default": multilabel_margin_loss_backward,
    "aten._weight_norm_interface_backward.default": weight_norm_interface_backward,
    "aten.glu_jvp.default": glu_jvp,
    "aten.glu_backward_jvp.default": glu_backward_jvp,
}
