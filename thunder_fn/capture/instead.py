"""What stands for functions of PyTorch that write to memory of their own or read values, which tracers do not have."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def deepcopy(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy with the same `requires_grad`, as eager's."""
    if not x.is_leaf:
        raise RuntimeError("only graph leaves support deepcopy; call `.detach().clone()` instead")
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return memo[id(x)]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """PyTorch's, which writes lengths that are numbers into memory of its own. Reduction: 0 none, 1 mean, 2 sum."""
    if isinstance(input_lengths, Tensor) or isinstance(target_lengths, Tensor):
        return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    labels = targets.to(batch.device, torch.int64)
    loss, _ = torch.ops.aten._ctc_loss(batch, labels, input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction == 1:
        lengths = torch.tensor(target_lengths, dtype=loss.dtype, device=loss.device)
        return (loss / lengths.clamp_min(1)).mean()
    if reduction == 2:
        return loss.sum()
    return loss if log_probs.dim() == 3 else loss.squeeze(0)


MAX_LISTED = 64
"""Of how many elements `tolist` makes symbols."""


def can_be_listed(x: Tensor) -> bool:
    """A tensor of a few numbers, each of which can be a symbol."""
    sizes = [size if type(size) is int else math.inf for size in x.shape]
    return math.prod(sizes) <= MAX_LISTED and not x.dtype.is_complex and x.dtype != torch.bool


def tolist(x: Tensor) -> Any:
    """The numbers, each found in data."""
    return list(map(tolist, x.unbind(0))) if x.dim() else x.item()
