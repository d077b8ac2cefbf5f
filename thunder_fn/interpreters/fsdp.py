"""fsdp: every rank keeps a shard of each parameter and gathers the whole where it is used.

Every rank runs the same trace. Collectives are leaf ops of it, PyTorch's functional ones. So `grad`
of an all-gather is a reduce-scatter by PyTorch's own formula, and the trace shows the order of all
communication. A block of a model is a composite, and where its parameters meet they are gathered
together, in one collective (`units.py`).

Sources: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).

Gradients are divided by a `custom_vjp`, so tangents of forward mode are not divided. One bucket is
gathered ahead by default: many steps follow the longer first one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from thunder_fn.distributed.collectives import all_gathered, divided_gradient
from thunder_fn.distributed.groups import Group
from thunder_fn.interpreters.rewriting.representation import Representation
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.interpreters.rewriting.units import Bucket, Company, InUnits, company_of
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import TensorType, static_shape


def rows_of(type: TensorType, size: int) -> int:
    """The rows of a shard: dim 0 split evenly, the last shards padded."""
    shape = static_shape(type)
    return math.ceil((shape[0] if shape else 1) / size)


@dataclass(frozen=True)
class Fsdp:
    """The step of `fsdp`: each rank keeps a shard of the rows of each parameter."""

    group: Group
    zero: int
    bucket: Bucket
    reduction: str
    precision: torch.dtype | None = None
    offload: bool = False
    prefetch: int | None = None
    frozen: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def in_flight(self) -> int | None:
        """The number of gathers that may be in flight; None where each is awaited where it is
        sent.
        """
        ahead = 0 if self.prefetch is None and isinstance(self.bucket, int) else self.prefetch
        return None if ahead is None else ahead + 1

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        return sharded(replace(self, frozen=frozenset()), type, company_of(name, self.frozen))


@memo(4096)
def sharded(step: Fsdp, type: TensorType, company: Company) -> Representation:
    """A parameter of this type of which every rank keeps some rows."""
    size = step.group.size
    rank = step.group.rank
    rows = rows_of(type, step.group.size)
    shape = static_shape(type)

    def encode(w: torch.Tensor) -> torch.Tensor:
        w = w.reshape(shape or (1,))
        padding = w.new_zeros((size * rows - w.shape[0], *w.shape[1:]))
        shard = torch.cat((w, padding)).reshape(size, rows, *w.shape[1:])[rank].clone()
        return shard.to("cpu") if step.offload else shard

    encoded = traced(encode, type)
    (part,) = (part for part in encoded.output_types if isinstance(part, TensorType))
    decoded = traced(lambda shard: gathered(step, (type,), (shard,))[0], part)
    return Representation(
        "fsdp", type, ("",), encoded, decoded, rule=InUnits(step, gathered, company)
    )


def gathered(
    step: Fsdp, types: Sequence[TensorType], shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Whole parameters from shards of the same dtype, in one collective."""
    size, widths = step.group.size, [shard.numel() for shard in shards]
    flat = (
        torch.cat([shard.reshape(-1) for shard in shards])
        if len(shards) > 1
        else shards[0].reshape(-1)
    )
    flat = flat.to(types[0].device)  # from where it was offloaded to
    precision = step.precision if flat.dtype.is_floating_point and flat.dtype.itemsize > 1 else None
    before, after = _divisors(size, precision or flat.dtype) if step.reduction == "mean" else (1, 1)
    flat = divided_gradient(flat, after)
    whole = divided_gradient(all_gathered(flat.to(precision or flat.dtype), step.group), before)
    columns = whole.reshape(size, sum(widths)).split(widths, 1)
    return [
        _unpadded(column, type, size).to(type.dtype)
        for column, type in zip(columns, types, strict=True)
    ]


def _divisors(size: int, dtype: torch.dtype) -> tuple[float, float]:
    """The divisors of gradients before and after they are added up. Sums of float16 would overflow;
    these are FSDP2's.
    """
    before = 1
    while dtype == torch.float16 and size % before == 0 and size > before * before:
        before *= 2
    return before, size / before


def _unpadded(column: torch.Tensor, type: TensorType, size: int) -> torch.Tensor:
    shape = static_shape(type)
    return column.reshape(size * rows_of(type, size), *shape[1:])[
        : shape[0] if shape else 1
    ].reshape(shape)
