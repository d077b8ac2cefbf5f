"""The common part of the rules of while_loop and carry_at: literals, parts of operands, and
bodies made of a body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    Op,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
)

T = TypeVar("T")
WHILE = Op("structured", "while_loop")
BOOL = TensorType(torch.bool, ())
COUNT = TensorType(torch.int64, ())
"""The type of step counters: they are on the CPU, where a loop's condition costs nothing."""


@dataclass(frozen=True, slots=True)
class While:
    """The literals of a while_loop: how many operands are consts, and after how many steps it
    ends in any case.
    """

    num_consts: int
    max_steps: int | None = None

    @staticmethod
    def of(equation: Equation) -> While:
        """The literals of an equation."""
        return While(**equation.literals)

    def parts(self, operands: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """Operands, or facts about each, as those of the consts and of the carries."""
        return tuple(operands[: self.num_consts]), tuple(operands[self.num_consts :])


def add_while(
    builder: TraceBuilder,
    bodies: tuple[Trace, Trace],
    consts: Sequence[Atom],
    carry: Sequence[Atom],
    max_steps: int | None,
    source: Source | None,
) -> tuple[Var, ...]:
    """Append a while_loop of a condition and a body."""
    kwargs = (("num_consts", Literal(len(consts))), ("max_steps", Literal(max_steps)))
    types = bodies[1].output_types
    return builder.add(WHILE, (*consts, *carry), types, kwargs=kwargs, bodies=bodies, source=source)
