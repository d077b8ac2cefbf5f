"""Constant folding: equations that depend on nothing but the trace's own small constants are
computed once, now.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound, needed, operands_in
from thunder_fn.ir.memory import leaving_variables
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Constant, Equation, TensorType, Trace, Var, cut

LIMIT_BYTES = 1 << 16
"""Larger results are computed each time: they would be kept as long as the trace."""


@memo(4096)
def fold_constants(trace: Trace, limit_bytes: int = LIMIT_BYTES) -> Trace:
    """Replace equations on owned constants and literals by their results, in bodies too.

    Law: same values, bitwise; idempotent. Closed-over tensors of the user's are never read, as they
        may change; random numbers are never drawn. Results are computed each time, so that nobody
        can write to a constant.
    """
    foldable = _foldable(trace, limit_bytes)
    kept = [
        _with_folded_bodies(e, limit_bytes) for e in trace.equations if not _is_folded(e, foldable)
    ]
    read = {var.index for var in operands_in(kept)}
    folded = [e for e in trace.equations if _is_folded(e, foldable)]
    frontier = [var for var in bound(folded) if var.index in read]
    values = _compute(trace, frontier)
    found = tuple(
        Constant(var, value, owned=True) for var, value in zip(frontier, values, strict=True)
    )
    return cut(trace, equations=kept, constants=(*trace.constants, *found))


def _with_folded_bodies(equation: Equation, limit_bytes: int) -> Equation:
    if not equation.bodies:
        return equation
    bodies = tuple(fold_constants(body, limit_bytes) for body in equation.bodies)
    return replace(equation, bodies=bodies)


def _is_folded(equation: Equation, foldable: set[int]) -> bool:
    return bool(equation.outputs) and all(var.index in foldable for var in equation.outputs)


def _foldable(trace: Trace, limit_bytes: int) -> set[int]:
    """The variables that are known now. Factories such as `arange` are where something is
    computed from them.
    """
    leaving = leaving_variables(trace)
    known = {constant.var.index for constant in trace.constants if constant.owned}
    found: set[int] = set()
    computed: set[int] = set()
    for equation in trace.equations:
        operands = {var.index for var in equation.operands}
        small = all(
            _bytes(var) <= limit_bytes and var.index not in leaving for var in equation.outputs
        )
        is_leaf = equation.op.kind == "leaf" and operands <= known
        if is_leaf and small and not ops.has_side_effect(equation):
            outputs = {var.index for var in equation.outputs}
            known |= outputs
            found |= outputs
            computed |= outputs if operands else set()
    return found if computed else set()


def _bytes(var: Var) -> int:
    if not isinstance(var.type, TensorType) or not all(
        isinstance(dim, int) for dim in var.type.shape
    ):
        return 1 << 62
    count = var.type.dtype.itemsize
    for dim in var.type.shape:
        count *= dim if isinstance(dim, int) else 1
    return count


def _compute(trace: Trace, wanted: list[Var]) -> tuple[Any, ...]:
    """The values of variables that no input decides."""
    if not wanted:
        return ()
    equations = needed(trace.equations, {var.index for var in wanted})
    program = cut(trace, inputs=(), equations=equations, outputs=wanted, name="program")
    with torch.no_grad():
        return evaluate(program, ())
