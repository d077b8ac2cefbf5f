"""The common part of scan's rules: literals, the parts of operands, and a builder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from thunder_fn.errors import InvalidTrace
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    Op,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    as_kwargs,
)
from thunder_fn.structured.shared.bodies import tensor_type

T = TypeVar("T")
Parts = tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]

SCAN = Op("structured", "scan")


@dataclass(frozen=True, slots=True)
class Loop:
    """The literals of a scan: how many operands are consts and carries, how many steps, in which
    direction.
    """

    num_consts: int
    num_carry: int
    length: Dim
    reverse: bool = False
    unroll: int = 1

    @staticmethod
    def of(equation: Equation) -> Loop:
        """The literals of an equation."""
        return Loop(**equation.literals)

    @property
    def steps(self) -> int:
        """The length of a loop that is written out, which is a number."""
        if not isinstance(self.length, int):
            raise InvalidTrace(
                f"scan: the length {self.length} is symbolic, where a number is needed"
            )
        return self.length

    def literals(self) -> dict[str, Any]:
        """The keyword arguments of the equation."""
        return {
            name: getattr(self, name)
            for name in ("num_consts", "num_carry", "length", "reverse", "unroll")
        }

    def parts(self, operands: Sequence[T]) -> Parts[T]:
        """Operands, or facts about each, as those of the consts, the carries and the xs."""
        first, second = self.num_consts, self.num_consts + self.num_carry
        return tuple(operands[:first]), tuple(operands[first:second]), tuple(operands[second:])

    def results(self, outputs: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """Outputs as those of the carries and the ys."""
        return tuple(outputs[: self.num_carry]), tuple(outputs[self.num_carry :])


def stacked(type: Type, length: Dim) -> TensorType:
    """The type of `length` values along a new first dim."""
    tensor = tensor_type(type)
    return TensorType(tensor.dtype, (length, *tensor.shape), tensor.device)


def slice_of(type: Type) -> TensorType:
    """The type of one slice along dim 0."""
    tensor = tensor_type(type)
    return TensorType(tensor.dtype, tensor.shape[1:], tensor.device)


def add_scan(
    builder: TraceBuilder, loop: Loop, body: Trace, parts: Parts[Atom], source: Source | None
) -> tuple[Var, ...]:
    """Append a scan of the body; the numbers of consts and carries are those of the parts."""
    loop = replace(loop, num_consts=len(parts[0]), num_carry=len(parts[1]))
    carry, ys = loop.results(body.output_types)
    types = (*carry, *(stacked(type, loop.length) for type in ys))
    kwargs = as_kwargs(loop.literals())
    return builder.add(
        SCAN, (*parts[0], *parts[1], *parts[2]), types, kwargs=kwargs, bodies=(body,), source=source
    )
