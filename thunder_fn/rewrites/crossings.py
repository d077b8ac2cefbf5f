"""What crosses the border of a layer whose ranks work on one batch: three functions, each the adjoint of another.

`copied` is nothing forwards and a sum backwards, `summed` a sum forwards and nothing backwards, and `share` and
`gathered_dim` take apart and put together.

Source: Megatron-LM, section 3 (arXiv:1909.08053).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from thunder_fn.rewrites.distributed import Ddp, Group, collectives, divided_gradient, reduced
from thunder_fn.structured.custom_vjp import custom_vjp
from thunder_fn.trace import TensorType, type_of_value


def copied(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x; gradients of all ranks are added, since each rank knows those of its share only."""
    type = type_of_value(x)
    assert isinstance(type, TensorType), "a tensor has a tensor's type"
    return reduced(Ddp(group, "each", "sum"), (type,), (x,))[0]


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks. Its gradient is the same on all ranks, and each one's own."""

    @custom_vjp
    def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group.name))

    sum_over_ranks.defvjp(lambda x: (sum_over_ranks(x), None), lambda _, ct: (ct,))
    return sum_over_ranks(x)


def gathered_dim(x: torch.Tensor, group: Group, dim: int, size: int) -> torch.Tensor:
    """The shares of all ranks beside each other along a dim, without padding beyond a size."""
    first = divided_gradient(x.movedim(dim, 0).contiguous(), group.size)  # all ranks add one and the same gradient
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(first, group.size, group.name))
    return whole[:size].movedim(0, dim).contiguous()  # PyTorch's attention on CPUs reads any other last dim wrongly


def share(x: torch.Tensor, rank: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's share of a dim, the last ones padded with zeros."""
    dim %= x.dim()
    each = math.ceil(x.shape[dim] / group.size)
    short = each * group.size - x.shape[dim]
    x = F.pad(copied(x, group), (*(0, 0) * (x.dim() - 1 - dim), 0, short))
    return x.unflatten(dim, (group.size, each)).index_select(dim, rank.reshape(1)).squeeze(dim)
