"""Partial evaluation: split a trace by what is known first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from thunder_fn.errors import MissingRule, located
from thunder_fn.interpreters.carried import self_contained
from thunder_fn.interpreters.simplify import dce, inline, is_kept
from thunder_fn.rules import Mask, Residual, Split, memo, rules_of
from thunder_fn.symbols import finders
from thunder_fn.trace import Equation, Trace, Var, canonical, num_vars


@memo(1024)
def partial_eval(trace: Trace, known_inputs: Mask, known_outputs: Mask) -> tuple[Trace, Trace]:
    """Split a trace into a part on the known inputs and a part on residuals and the unknown inputs.

    Law: running `first` on the known inputs and `second`, wherever it runs, on its residuals and the unknown inputs
    gives the outputs.

    Args:
        known_inputs: one per input.
        known_outputs: one per output; a known output depends on known inputs only.

    Returns:
        `first`: known inputs to known outputs, then residuals. `second`: residuals, then unknown inputs, to the other
        outputs. Random equations that are known run in `first` only.

    Source: autodidax part 4.
    """
    flat = dce(inline(trace))
    known = {var.index for var, flag in zip(flat.inputs, known_inputs, strict=True) if flag}
    known |= {constant.var.index for constant in flat.constants}
    fresh = itertools.count(num_vars(flat))
    early: list[Equation] = []
    late: list[Equation] = []
    for equation in flat.equations:
        if all(var.index in known for var in equation.operands):
            early.append(equation)
            known.update(var.index for var in equation.outputs)
            continue
        first_half, second_half = _halves(equation, known, fresh)
        early += first_half
        late += second_half
        known.update(var.index for half in first_half for var in half.outputs)
    late_outputs = tuple(atom for atom, flag in zip(flat.outputs, known_outputs, strict=True) if not flag)
    early_outputs = tuple(atom for atom, flag in zip(flat.outputs, known_outputs, strict=True) if flag)
    found = {var.index for var in finders(flat).values()}
    late = _needed(late, {atom.index for atom in late_outputs if isinstance(atom, Var)} | found)
    constants = {constant.var.index for constant in flat.constants}
    reads = {var.index: var for equation in late for var in equation.operands}
    reads |= {atom.index: atom for atom in late_outputs if isinstance(atom, Var)}
    residuals = tuple(var for index, var in reads.items() if index in known and index not in constants)
    first_inputs = tuple(var for var, flag in zip(flat.inputs, known_inputs, strict=True) if flag)
    second_inputs = tuple(var for var, flag in zip(flat.inputs, known_inputs, strict=True) if not flag)
    first = canonical(
        first_inputs, tuple(early), (*early_outputs, *residuals), flat.constants, name=f"{trace.name}_known"
    )
    second = canonical(
        (*residuals, *second_inputs), tuple(late), late_outputs, flat.constants, name=f"{trace.name}_rest"
    )
    kept = tuple(Residual("extra", place) for place in range(len(residuals)))
    split = self_contained(Split(dce(first), second, kept, ()))
    return split.forward, split.backward


def follows_from(trace: Trace, known_inputs: Mask) -> set[int]:
    """The variables that follow from known inputs and constants, composites taken whole."""
    known = {var.index for var, flag in zip(trace.inputs, known_inputs, strict=True) if flag}
    known |= {constant.var.index for constant in trace.constants}
    for equation in trace.equations:
        if all(var.index in known for var in equation.operands):
            known.update(var.index for var in equation.outputs)
    return known


def _halves(equation: Equation, known: set[int], fresh: Iterator[int]) -> tuple[list[Equation], list[Equation]]:
    """A structured equation on some unknown operands: cut down to what is known without them, and to the rest.

    The rest computes again what it needs of the first half, unless the op says how to divide it.
    """
    if equation.op.kind != "structured":
        return [], [equation]
    flags = tuple(_is_known(equation, position, known) for position in range(len(equation.outputs)))
    divide = rules_of(equation).divide
    if divide is not None:
        known_operands = tuple(var.index in known for var in equation.operands)
        return _divided(equation, divide(equation, known_operands, flags), known_operands, flags, fresh)
    if not any(flags):
        return [], [equation]
    if is_kept(equation):
        raise MissingRule(
            located(
                f"partial_eval: {equation.op} draws random numbers or has effects, and cannot be run in two halves",
                source=equation.source,
                fix="Use jvp instead of linearize, or draw the random numbers before it.",
            )
        )
    dce = rules_of(equation).dce
    return [dce(equation, flags)[0]], [dce(equation, tuple(not flag for flag in flags))[0]]


def _divided(
    equation: Equation, parts: tuple[Trace, Trace], known_operands: Mask, flags: Mask, fresh: Iterator[int]
) -> tuple[list[Equation], list[Equation]]:
    """One equation for each part of the body; residuals are new variables."""
    count = sum(flags)
    residuals = tuple(Var(next(fresh), type) for type in parts[0].output_types[count:])
    operands: tuple[list[Var], list[Var]] = [], list(residuals)
    outputs: tuple[list[Var], list[Var]] = [], []
    for var, flag in zip(equation.operands, known_operands, strict=True):
        operands[not flag].append(var)
    for var, flag in zip(equation.outputs, flags, strict=True):
        outputs[not flag].append(var)
    outputs[0].extend(residuals)
    early, late = (
        [replace(equation, args=tuple(args), outputs=tuple(results), bodies=(body,))]
        for args, results, body in zip(operands, outputs, parts, strict=True)
    )
    return early, late


def _is_known(equation: Equation, position: int, known: set[int]) -> bool:
    wanted = tuple(index == position for index in range(len(equation.outputs)))
    return all(var.index in known for var in rules_of(equation).dce(equation, wanted)[1])


def _needed(equations: list[Equation], wanted: set[int]) -> list[Equation]:
    kept: list[Equation] = []
    for equation in reversed(equations):
        if is_kept(equation) or any(var.index in wanted for var in equation.outputs):
            kept.append(equation)
            wanted.update(var.index for var in equation.operands)
    return kept[::-1]
