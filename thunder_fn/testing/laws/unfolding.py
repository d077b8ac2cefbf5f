"""The meaning of structured ops, written out: the judge of their rules.

A scan is its steps one after the other, and a known choice is the branch. A loop whose number of
steps is known is so many steps. A checkpoint and a function with a rule of its own are their
bodies. Leaves are left of a trace, and the choices and loops that only values decide. No rule of a
structured op is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.equations import needed
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    cut,
    static_shape,
)
from thunder_fn.ir.walking import put, walk
from thunder_fn.structured.shared.scan_parts import Loop
from thunder_fn.structured.shared.while_parts import COUNT, While
from thunder_fn.testing.laws.losses import emit

aten = torch.ops.aten
MAX_STEPS = 8
"""Loops of more steps stay as they are."""

Atoms: TypeAlias = tuple[Atom, ...]
Known: TypeAlias = dict[int, Any]
"""The values of variables that hold one number which is written in the trace."""


def unfolded(trace: Trace) -> Trace:
    """The trace with its structured ops and composites written out.

    Law: same values, bitwise, the same random numbers in the same order, and the same derivatives.
    """
    builder = TraceBuilder(trace.name)
    inputs = builder.take(trace.input_types)
    return builder.build(_write_out(builder, trace, inputs, {}))


def _write_out(builder: TraceBuilder, trace: Trace, arguments: Atoms, known: Known) -> Atoms:
    def step(equation: Equation, operands: Atoms) -> Atoms:
        written = WRITTEN_OUT.get(
            equation.op.name, _body if equation.op.kind == "composite" else _none
        )
        results: Atoms | None = written(builder, equation, operands, known)
        if results is None:
            results = put(builder, equation, operands, bodies=tuple(map(unfolded, equation.bodies)))
        if (
            equation.op.name == "aten.full.default"
            and equation.args[0] == ()
            and isinstance(results[0], Var)
        ):
            known[results[0].index] = (
                equation.args[1].value if isinstance(equation.args[1], Literal) else None
            )
        return results

    return walk(builder, trace, arguments, step)


def _none(builder: TraceBuilder, equation: Equation, operands: Atoms, known: Known) -> Atoms | None:
    """Leave it as it is, with its bodies written out."""
    return None


def _body(builder: TraceBuilder, equation: Equation, operands: Atoms, known: Known) -> Atoms:
    """The first body, on the operands."""
    return _write_out(builder, equation.bodies[0], operands, known)


def _branch(
    builder: TraceBuilder, equation: Equation, operands: Atoms, known: Known
) -> Atoms | None:
    """The branch, where it is known."""
    choice, *rest = operands
    value = known.get(choice.index) if isinstance(choice, Var) else None
    if value is None:
        return None
    last = len(equation.bodies) - 1
    number = (0 if value else 1) if equation.op.name == "cond" else min(max(int(value), 0), last)
    return _write_out(builder, equation.bodies[number], tuple(rest), known)


def _steps(
    builder: TraceBuilder, equation: Equation, operands: Atoms, known: Known
) -> Atoms | None:
    """Unfold the steps of a scan, each on its slices."""
    loop = Loop.of(equation)
    if not isinstance(loop.length, int) or loop.length > MAX_STEPS:
        return None
    consts, carry, xs = loop.parts(operands)
    columns: list[list[Atom]] = [[] for _ in equation.outputs[loop.num_carry :]]
    for step in reversed(range(loop.steps)) if loop.reverse else range(loop.steps):
        slices = tuple(emit(builder, aten.select.int, x, 0, step) for x in xs)
        carry, ys = loop.results(_write_out(builder, equation.body, (*consts, *carry, *slices), {}))
        for column, y in zip(columns, ys, strict=True):
            column.append(y)
    types = (var.type for var in equation.outputs[loop.num_carry :])
    stacks = (
        _stacked(builder, column, type, loop.reverse)
        for column, type in zip(columns, types, strict=True)
    )
    return (*carry, *stacks)


def _stacked(builder: TraceBuilder, column: list[Atom], type: Any, reverse: bool) -> Var:
    if column:
        return emit(builder, aten.stack.default, tuple(column[::-1] if reverse else column))
    assert isinstance(type, TensorType), "only tensors are stacked"
    return emit(
        builder, aten.full.default, static_shape(type), 0, dtype=type.dtype, device=type.device
    )


def _counted_steps(
    builder: TraceBuilder, equation: Equation, operands: Atoms, known: Known
) -> Atoms | None:
    """Every step of a loop that does nothing but count to know when it ends, and draws no random
    numbers for it.
    """
    loop, (condition, body) = While.of(equation), equation.bodies
    consts, carry = loop.parts(operands)
    first = carry[0] if carry else None
    value = known.get(first.index) if isinstance(first, Var) else None
    goes_on, counts = _of_counter(condition, loop.num_consts), _of_counter(body, loop.num_consts)
    if value is None or goes_on is None or counts is None or ops.has_effects(condition):
        return None
    limit, steps, counter = loop.max_steps, 0, torch.tensor(value)
    while (limit is None or steps < limit) and goes_on(counter):
        counter, steps = counts(counter), steps + 1
        if steps > MAX_STEPS:
            return None
    for _ in range(steps):
        carry = _write_out(builder, body, (*consts, *carry), {})
    return carry


def _of_counter(trace: Trace, position: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The first output as a function of one input, where it reads nothing else."""
    need = {atom.index for atom in trace.outputs[:1] if isinstance(atom, Var)}
    kept = needed(trace.equations, need)
    others = {var.index for index, var in enumerate(trace.inputs) if index != position}
    constants = {constant.var.index for constant in trace.constants}
    if (
        need & (others | constants)
        or any(map(ops.has_side_effect, kept))
        or trace.inputs[position].type != COUNT
    ):
        return None
    small = cut(trace, inputs=(trace.inputs[position],), equations=kept, outputs=trace.outputs[:1])
    return lambda counter: evaluate(small, (counter,))[0]


WRITTEN_OUT: dict[str, Callable[[TraceBuilder, Equation, Atoms, Known], Atoms | None]] = {
    "call": _body,
    "checkpoint": _body,
    "custom_vjp": _body,
    "cond": _branch,
    "switch": _branch,
    "scan": _steps,
    "while_loop": _counted_steps,
}
