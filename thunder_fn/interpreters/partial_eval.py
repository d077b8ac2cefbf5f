"""Partial evaluation: split a trace by the inputs that are known first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.carried import self_contained, told_by_inputs
from thunder_fn.interpreters.simplify import dce, inline
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound, needed
from thunder_fn.ir.flow import Flow
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import DCE, PARTIAL_EVAL, Mask, Split, chosen, divided
from thunder_fn.ir.splitting import dependent, handing_on, is_late, split
from thunder_fn.ir.symbols import finders
from thunder_fn.ir.trace import Equation, Trace, Var, num_vars


@memo(1024)
def partial_eval(trace: Trace, known_inputs: Mask, known_outputs: Mask) -> tuple[Trace, Trace]:
    """Split a trace into a part on the known inputs and a part on residuals and the unknown inputs.

    Law: running `first` on the known inputs and `second`, wherever it runs, on its residuals and
        the unknown inputs gives the outputs.

    Args:
        known_inputs: one per input.
        known_outputs: one per output; a known output depends on known inputs only.

    Returns:
        `first`: known inputs to known outputs, then residuals. `second`: residuals, then unknown
            inputs, to the other outputs. Random equations that are known run in `first` only.

    Source: autodidax part 4.
    """
    halves = told_by_inputs(partial_split(trace, known_inputs, known_outputs))
    return dce(handing_on(halves)), halves.backward


def partial_split(trace: Trace, known_inputs: Mask, known_outputs: Mask) -> Split:
    """Evaluate partially as a split, which says where in the first part each residual is found."""
    flat = dce(inline(trace))
    known = {var.index for var in chosen(flat.inputs, known_inputs)}
    known |= {constant.var.index for constant in flat.constants}
    fresh = itertools.count(num_vars(flat))
    equations: list[Equation] = []
    for equation in flat.equations:
        if all(var.index in known for var in equation.operands):
            first, second = [equation], []
        else:
            first, second = _halves(equation, known, fresh)
        equations += (*first, *second)
        known.update(var.index for var in bound(first))
    late = {var.index for var in (*flat.inputs, *bound(equations))} - known
    outputs = divided(flat.outputs, known_outputs)
    numbers = tuple(var for var in finders(flat).values() if var.index in late)
    wanted = {atom.index for atom in (*outputs[1], *numbers) if isinstance(atom, Var)}
    kept = needed(equations, wanted, lambda one: ops.has_side_effect(one) or not is_late(one, late))
    names = (f"{trace.name}_known", f"{trace.name}_rest")
    return self_contained(split(flat, late, outputs, equations=kept, names=names))


def follows_from(trace: Trace, known_inputs: Mask) -> set[int]:
    """The variables that follow from known inputs and constants, composites taken whole."""
    return set(range(num_vars(trace))) - dependent(trace, tuple(not flag for flag in known_inputs))


def _halves(
    equation: Equation, known: set[int], fresh: Iterator[int]
) -> tuple[list[Equation], list[Equation]]:
    """A structured equation on some unknown operands: cut down to its known part, and to the rest.

    The rest computes its operands of the first half again, unless the op says how to divide it.
    """
    if equation.op.kind != "structured":
        return [], [equation]
    flags = _known_results(equation, known)
    divide = PARTIAL_EVAL.find(equation.op)
    if divide is not None:
        known_operands = tuple(var.index in known for var in equation.operands)
        return _divided(
            equation, divide(equation, known_operands, flags), known_operands, flags, fresh
        )
    if not any(flags):
        return [], [equation]
    if ops.has_side_effect(equation):
        draws = ops.has_random(equation)
        does = "draws random numbers" if draws else "checks values, or has another effect"
        raise MissingRule(
            f"partial_eval: {equation.op} {does}, and cannot be run in two halves",
            source=equation.source,
            fix="Use jvp instead of linearize"
            + (", or draw the random numbers before it." if draws else "."),
        )
    dce = DCE.of(equation)
    first, second = dce(equation, flags)[0], dce(equation, tuple(not flag for flag in flags))[0]
    # a loop keeps the carries that it needs in both halves
    own = {var.index for var in first.outputs}
    outputs = tuple(
        Var(next(fresh), var.type) if var.index in own else var for var in second.outputs
    )
    return [first], [replace(second, outputs=outputs)]


def _divided(
    equation: Equation,
    parts: tuple[Trace, Trace],
    known_operands: Mask,
    flags: Mask,
    fresh: Iterator[int],
) -> tuple[list[Equation], list[Equation]]:
    """One equation for each part of the body; residuals are new variables."""
    # Before: operands -> outputs
    # After:  early: known operands -> known outputs, residuals
    #         late:  residuals, unknown operands -> unknown outputs
    count = sum(flags)
    residuals = tuple(Var(next(fresh), type) for type in parts[0].output_types[count:])
    operands, outputs = divided(equation.operands, known_operands), divided(equation.outputs, flags)
    halves = (
        (operands[0], (*outputs[0], *residuals), parts[0]),
        ((*residuals, *operands[1]), outputs[1], parts[1]),
    )
    early, late = (
        [replace(equation, args=args, outputs=results, bodies=(body,))]
        for args, results, body in halves
    )
    return early, late


INFLUENCED = Flow(
    "forward", lambda equation, flags: (any(flags),) * len(equation.outputs), control=True
)
"""The flow of influence: a result depends on marked operands, or these choose it."""


def _known_results(equation: Equation, known: set[int]) -> Mask:
    """Tell which results of a structured equation follow from known operands.

    Effects in its bodies, such as checks of tangents, stay whatever its results need. They keep no
    result from being known.
    """
    if ops.has_side_effect(equation):
        late = INFLUENCED.through(equation, tuple(v.index not in known for v in equation.operands))
        return tuple(not flag for flag in late)
    count = len(equation.outputs)
    wanted = (tuple(index == position for index in range(count)) for position in range(count))
    reads = (DCE.of(equation)(equation, flags)[1] for flags in wanted)
    return tuple(all(var.index in known for var in operands) for operands in reads)
