"""ddp: every rank keeps all parameters; their gradients are reduced over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.distributed.collectives import added_up
from thunder_fn.distributed.groups import Group
from thunder_fn.interpreters.fsdp import Fsdp
from thunder_fn.interpreters.rewriting.representation import Representation
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.interpreters.rewriting.units import Bucket, Company, InUnits, company_of
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import TensorType, static_shape
from thunder_fn.structured.custom_vjp import custom_vjp


@dataclass(frozen=True)
class Ddp:
    """The step of `ddp`: every rank keeps the parameters; their gradients are reduced."""

    group: Group
    bucket: Bucket
    reduction: str
    frozen: frozenset[str] = field(default=frozenset(), repr=False)
    zero: ClassVar[int] = 0
    in_flight: ClassVar[int | None] = None

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        if not is_differentiable(type):
            return None
        return replicated(replace(self, frozen=frozenset()), type, company_of(name, self.frozen))


def apart(steps: Sequence[Any], frozen: Iterable[str]) -> tuple[Any, ...]:
    """The steps, which let frozen parameters travel apart from others: nobody computes or sends
    gradients of them.
    """
    names = frozenset(frozen)
    return tuple(
        replace(step, frozen=names) if isinstance(step, Fsdp | Ddp) else step for step in steps
    )


@memo(4096)
def replicated(step: Ddp, type: TensorType, company: Company) -> Representation:
    """A parameter of this type that every rank keeps, its gradient the reduction of all ranks'."""
    same = traced(lambda w: w, type)
    decoded = traced(lambda w: reduced(step, (type,), (w,))[0], type)
    return Representation(
        "ddp", type, ("",), same, decoded, restore=same, rule=InUnits(step, reduced, company)
    )


def reduced(
    step: Ddp, types: Sequence[TensorType], params: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The parameters, with gradients that are reduced over the ranks in one collective."""
    group, widths = step.group, [math.prod(static_shape(type)) for type in types]

    @custom_vjp
    def reduce_gradients(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    def backward(_: Any, cotangents: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        flat = torch.cat([ct.reshape(-1) for ct in cotangents])
        if step.reduction == "mean" and group.size > 1:
            flat = flat * (1 / group.size)  # before they are added up, as DDP does
        whole = added_up(flat, group)
        return tuple(
            column.reshape(ct.shape)
            for column, ct in zip(whole.split(widths), cotangents, strict=True)
        )

    reduce_gradients.defvjp(lambda *xs: (tuple(x.view_as(x) for x in xs), None), backward)
    return list(reduce_gradients(*params))
