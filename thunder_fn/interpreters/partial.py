"""Partial evaluation: split a trace by what is known first."""

from __future__ import annotations

from functools import lru_cache

from thunder_fn.derive import Mask
from thunder_fn.interpreters.simplify import dce, inline, is_kept
from thunder_fn.trace import Equation, Trace, Var, canonical


@lru_cache(maxsize=1024)
def partial_eval(trace: Trace, known_inputs: Mask, known_outputs: Mask) -> tuple[Trace, Trace]:
    """Split a trace into a part on the known inputs and a part on residuals and the unknown inputs.

    Law: running `first` on the known inputs and `second` on its residuals and the unknown inputs gives the outputs.

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
    early: list[Equation] = []
    late: list[Equation] = []
    for equation in flat.equations:
        if all(var.index in known for var in equation.operands):
            early.append(equation)
            known.update(var.index for var in equation.outputs)
        else:
            late.append(equation)
    late_outputs = tuple(atom for atom, flag in zip(flat.outputs, known_outputs, strict=True) if not flag)
    early_outputs = tuple(atom for atom, flag in zip(flat.outputs, known_outputs, strict=True) if flag)
    late = _needed(late, {atom.index for atom in late_outputs if isinstance(atom, Var)})
    constants = {constant.var.index for constant in flat.constants}
    reads = {var.index: var for equation in late for var in equation.operands}
    reads |= {atom.index: atom for atom in late_outputs if isinstance(atom, Var)}
    residuals = tuple(var for index, var in reads.items() if index in known and index not in constants)
    first_inputs = tuple(var for var, flag in zip(flat.inputs, known_inputs, strict=True) if flag)
    second_inputs = tuple(var for var, flag in zip(flat.inputs, known_inputs, strict=True) if not flag)
    first = canonical(first_inputs, tuple(early), (*early_outputs, *residuals), flat.constants, name=f"{trace.name}_known")
    second = canonical((*residuals, *second_inputs), tuple(late), late_outputs, flat.constants, name=f"{trace.name}_rest")
    return dce(first), second


def _needed(equations: list[Equation], wanted: set[int]) -> list[Equation]:
    kept: list[Equation] = []
    for equation in reversed(equations):
        if is_kept(equation) or any(var.index in wanted for var in equation.outputs):
            kept.append(equation)
            wanted.update(var.index for var in equation.operands)
    return kept[::-1]
