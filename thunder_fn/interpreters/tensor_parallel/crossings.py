"""Crossings of a layer's border whose ranks work on one batch: three pairs of functions, each the
adjoint of the other.

`copied` is nothing forwards and a sum backwards, `summed` a sum forwards and nothing backwards.
`share` takes apart forwards and puts together backwards. `gathered_dim` puts together forwards and
takes apart backwards. Nothing is sent for that, since all ranks have the same gradient of a value
that they all have. `collected` is `gathered_dim` and then `copied`, `scattered` is `summed` and
then `share`: each sends half of what the two would.

Sources: Megatron-LM, section 3 (arXiv:1909.08053); sequence parallelism (arXiv:2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from thunder_fn.distributed.collectives import added_up, all_gathered, reduce_scattered
from thunder_fn.distributed.groups import Group
from thunder_fn.interpreters.ddp import Ddp, reduced
from thunder_fn.ir.memos import kept_of_ops
from thunder_fn.ir.trace import TensorType, type_of_value
from thunder_fn.structured.custom_vjp import custom_vjp

Crossing = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of a tensor and the number of this rank."""


def copied(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x; gradients of all ranks are added, since each rank knows those of its share only."""
    type = type_of_value(x)
    assert isinstance(type, TensorType), "a tensor has a tensor's type"
    return reduced(Ddp(group, "each", "sum"), (type,), (x,))[0]


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks. Its gradient is the same on all ranks, and each one's own."""

    @custom_vjp
    def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
        return added_up(x.contiguous(), group)

    sum_over_ranks.defvjp(lambda x: (sum_over_ranks(x), None), lambda _, ct: (ct,))
    return sum_over_ranks(x)


def gathered_dim(
    x: torch.Tensor, rank: torch.Tensor, group: Group, dim: int, size: int
) -> torch.Tensor:
    """The shares of all ranks beside each other along a dim, without padding beyond a size."""
    return _gathering(group, dim % x.dim(), size)(x, rank)


def share(x: torch.Tensor, rank: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Take this rank's share of a dim, the last ones padded with zeros."""
    return _sharing(group, dim % x.dim(), x.shape[dim])(x, rank)


def collected(
    x: torch.Tensor, rank: torch.Tensor, group: Group, dim: int, size: int
) -> torch.Tensor:
    """The shares of all ranks beside each other along a dim; gradients of all ranks are added."""
    return _collecting(group, dim % x.dim(), size)(x, rank)


def scattered(x: torch.Tensor, rank: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's share of a dim, which the ranks divide, of the sum over ranks."""
    return _scattering(group, dim % x.dim(), x.shape[dim])(x, rank)


def chunks_of(x: torch.Tensor, group: Group, count: int) -> tuple[torch.Tensor, ...]:
    """Cut dim -2, which has the shares of all ranks, into chunks with a part of each share."""
    parts = x.unflatten(-2, (group.size, count, -1)).unbind(-3)
    return tuple(part.flatten(-3, -2) for part in parts)


def joined_chunks(chunks: Sequence[torch.Tensor], group: Group) -> torch.Tensor:
    """Join chunks: the inverse of `chunks_of`."""
    parts = [chunk.unflatten(-2, (group.size, -1)) for chunk in chunks]
    return parts[0].flatten(-3, -2) if len(parts) == 1 else torch.stack(parts, -3).flatten(-4, -2)


def _crossing(compute: Crossing, back: Callable[[], Crossing]) -> Crossing:
    """A function of a tensor and this rank whose gradient is another crossing's value."""
    function = custom_vjp(compute)
    function.defvjp(
        lambda x, rank: (function(x, rank), rank), lambda rank, ct: (back()(ct, rank), None)
    )
    return function


@kept_of_ops()
def _collecting(group: Group, dim: int, size: int) -> Crossing:
    def collect_shares(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        return _gathering(group, dim, size)(x, rank)

    return _crossing(collect_shares, lambda: _scattering(group, dim, size))


@kept_of_ops()
def _scattering(group: Group, dim: int, size: int) -> Crossing:
    def scatter_sum(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        first = x.movedim(dim, 0).contiguous()
        own = reduce_scattered(first.reshape(-1), group)
        return own.reshape(size // group.size, *first.shape[1:]).movedim(0, dim).contiguous()

    return _crossing(scatter_sum, lambda: _collecting(group, dim, size))


@kept_of_ops()
def _gathering(group: Group, dim: int, size: int) -> Crossing:
    def gather_shares(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        first = x.movedim(dim, 0).contiguous()
        whole = all_gathered(first.reshape(-1), group).reshape(
            group.size * first.shape[0], *first.shape[1:]
        )
        # PyTorch's attention on CPUs reads any other last dim wrongly
        return whole[:size].movedim(0, dim).contiguous()

    return _crossing(gather_shares, lambda: _sharing(group, dim, size))


@kept_of_ops()
def _sharing(group: Group, dim: int, size: int) -> Crossing:
    each = math.ceil(size / group.size)

    def take_share(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (*(0, 0) * (x.dim() - 1 - dim), 0, each * group.size - size))
        return x.unflatten(dim, (group.size, each)).index_select(dim, rank.reshape(1)).squeeze(dim)

    return _crossing(take_share, lambda: _gathering(group, dim, size))
