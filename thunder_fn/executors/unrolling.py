"""Loops in blocks of steps: where each region is a launch, a block of small steps is one region.

v2 = scan(v0, v1, length=100)     ->      v2 = scan(v0, v1, length=100, unroll=25)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.executors.base import Fuse, FusionExecutor
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import Equation, Trace, as_kwargs
from thunder_fn.structured.shared.scan_parts import SCAN, Loop


def with_blocks(equation: Equation, fusions: Sequence[FusionExecutor]) -> Equation:
    """A scan of steps that one executor takes whole, in blocks as long as that executor asks for.

    Law: it computes what the equation computes. A scan that has blocks already keeps them, and one
        that the executor runs whole has none.
    """
    if equation.op != SCAN:
        return equation
    loop = Loop.of(equation)
    length = loop.length
    if loop.unroll > 1 or not isinstance(length, int) or is_symbolic(equation.body):
        return equation
    leaves = tuple(_leaves(equation.body))
    for fusion in fusions:
        if leaves and _takes_all(fusion, leaves) and fusion.runs_whole(_alone(equation)):
            return equation
        most = fusion.unrolls(leaves) if leaves and length > 1 else 1
        if most > 1 and _takes_all(fusion, leaves):
            blocks = math.ceil(length / most)
            literals = replace(loop, unroll=math.ceil(length / blocks)).literals()
            kwargs = as_kwargs(literals)
            return replace(equation, kwargs=kwargs)
    return equation


def _takes_all(fusion: FusionExecutor, leaves: Sequence[Equation]) -> bool:
    return all(isinstance(fusion.answer(leaf), Fuse) for leaf in leaves)


def _alone(equation: Equation) -> Trace:
    """The loop alone, its body without composites."""
    return alone(replace(equation, bodies=(inline(equation.body),)))


def _leaves(trace: Trace) -> Iterator[Equation]:
    """The equations of a body without composites."""
    for equation in trace.equations:
        body = None if ops.is_operator(equation.op) else lowered(equation)
        if body is None:
            yield equation
        else:
            yield from _leaves(body)
