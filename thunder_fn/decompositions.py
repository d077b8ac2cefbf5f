"""What some ops do in terms of other ops, where PyTorch itself cannot differentiate them.

Two tables, both by an op's name, both of functions with that op's signature:

- DIFFERENTIABLE: another way to call the op, for ops whose own derivative is missing or wrong. `svdvals`, for one,
  computes no singular vectors, but its derivative needs them.
- DECOMPOSITIONS: the op in terms of others, where PyTorch has neither a derivative nor a decomposition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
aten = torch.ops.aten

# ---- other ways to call an op ----


def _svd(A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    if compute_uv:
        return aten._linalg_svd(A, full_matrices, True, driver=driver)
    _, S, _ = aten._linalg_svd(A, False, True, driver=driver)
    return S.new_empty(0), S, S.new_empty(0)


def _eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    values, vectors = aten._linalg_eigh(A, UPLO, True)
    return values, vectors if compute_v else vectors.new_empty(0)


def _eigvals(A: Tensor) -> Any:
    return aten.linalg_eig(A)[0]


def _rrelu(self: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
    # PyTorch's derivative of the functional op reads the noise before it is drawn; that of the in-place one after.
    noise = noise.clone()
    return aten.rrelu_with_noise(self, noise, *args, **kwargs), noise


def _linear_cross_entropy(*args: Any) -> Any:
    # the last three arguments ask for the gradients, which the op computes beside the loss
    grads = (True, True, args[3] is not None)
    retain = (True,)
    return torch.ops.torch_nn._linear_cross_entropy_batch_chunked(*args[:-4], *retain, *grads)


DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "aten._linalg_svd.default": _svd,
    "aten._linalg_eigh.default": _eigh,
    "aten._linalg_eigvals.default": _eigvals,
    "aten._embedding_bag_forward_only.default": aten._embedding_bag.default,
    "aten.rrelu_with_noise_functional.default": _rrelu,
    "torch_nn._linear_cross_entropy_batch_chunked.default": _linear_cross_entropy,
}

FILLS = frozenset(
    f"aten.{name}"
    for name in (
        *("bernoulli.p", "bernoulli.Tensor", "uniform.default", "normal_functional.default", "exponential.default"),
        *("geometric.default", "cauchy.default", "log_normal.default"),
        *("random.default", "random.from", "random.to"),
    )
)
"""Ops that fill a tensor with random numbers, whatever was in it: their derivative is zero."""


# ---- decompositions ----


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """The gradient of softmax attention, from the queries, keys and values alone so that it can be differentiated."""
    if dropout_p:
        return NotImplemented
    factor: Any = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype is torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    grad_weights = grad @ value.transpose(-2, -1)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * factor
    return grad_scores @ key, grad_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad


def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """What `self.copy_(src)` leaves in self."""
    return src.to(self.dtype).expand(self.shape).clone()


def index_fill(self: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """PyTorch's derivative in the value looks for the distinct indices, how many there are depends on data."""
    if self.dim() == 0:
        return value.expand_as(self).clone()
    mask = torch.zeros(self.shape[dim], dtype=torch.bool, device=self.device).index_fill(0, index, 1)
    return torch.where(mask.view([-1] + [1] * (self.dim() - 1 - dim % self.dim())), value, self)


def index_put(self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Boolean masks as the positions of their true elements, of which there are as many as values."""
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if len(masks) != 1 or sum(index is not None for index in indices) != 1:
        return NotImplemented
    (mask,) = masks
    mask = mask.bool()
    before = next(i for i, index in enumerate(indices) if index is not None)
    after = self.dim() - before - mask.dim()
    values = values.reshape([1] * (before + 1 + after - values.dim()) + list(values.shape))
    count = values.shape[before]
    if count == 1:
        values = values.squeeze(before).reshape(
            [*values.shape[:before], *[1] * mask.dim(), *values.shape[before + 1 :]]
        )
        where = mask.reshape([*mask.shape, *[1] * after])
        return torch.where(where, self + values if accumulate else values, self)
    positions = torch.nonzero_static(mask, size=count).unbind(1)
    return aten.index_put(self, [None] * before + list(positions), values.expand([-1] * values.dim()), accumulate)


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
    "aten.copy.default": copy,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
}
