"""The law of unwritten memory: what `torch.empty` finds decides no result.

A program may allocate memory and write all of it before it reads. It then computes the same
whatever was there, and so must whatever a transform makes of it. Dependence on old memory is rarely
seen, so the memory is filled with one number, then with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from thunder_fn.ir import facts, ops
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    Trace,
    TraceBuilder,
    every_equation,
)
from thunder_fn.ir.walking import put, rewritten
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Transform,
    draws,
    holds,
    law_of,
    run,
    same_bits,
)
from thunder_fn.testing.laws.pairs import arguments_of

FILL = ops.leaf(torch.ops.aten.fill.Scalar)
FOUND = (3, -5)
"""The numbers that memory holds before it is written."""


def allocates(trace: Trace) -> bool:
    """Test whether a trace, or a body in it, has memory that nobody has written."""
    return any(e.op in facts.EMPTY for e in every_equation(trace))


def filled(trace: Trace, value: int) -> Trace:
    """The trace in which unwritten memory holds a number."""
    return rewritten(trace, partial(_fill, value))


def _fill(
    value: int, builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]
) -> Sequence[Atom]:
    bodies = tuple(filled(body, value) for body in equation.bodies)
    made = put(builder, equation, operands, bodies=bodies)
    if equation.op not in facts.EMPTY:
        return made
    return builder.add(FILL, (made[0], Literal(value)), (made[0].type,))


def is_deterministic(trace: Trace, inputs: Inputs) -> bool:
    """Test whether a trace gives the same bits whatever unwritten memory holds."""
    if not allocates(trace):
        return True
    first, second = (run(filled(trace, value), inputs) for value in FOUND)
    return all(map(same_bits, first, second))


@law_of
def stays_deterministic(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Make of a trace that reads written memory alone another such trace."""
    if not allocates(trace) or draws(trace) or not is_deterministic(trace, inputs):
        return False
    new = transform(trace)
    same = is_deterministic(new, arguments_of(new, trace, inputs))
    holds(same, "memory that nobody has written is read", trace=trace, made=new)
    return True
