"""Before reverse mode: which variables of a trace have derivatives, and which of these anybody asks for."""

from __future__ import annotations

from thunder_fn import ops
from thunder_fn.derive import alone, differentiable_outputs, is_differentiable
from thunder_fn.rules import Mask, memo, rules_of
from thunder_fn.trace import Atom, Trace, Var, num_vars


@memo(16384)
def activity(trace: Trace, wanted_inputs: Mask) -> Mask:
    """For each variable by index: does it depend, differentiably, on a wanted input?"""
    active = [False] * num_vars(trace)
    for var, wanted in zip(trace.inputs, wanted_inputs, strict=True):
        active[var.index] = wanted and is_differentiable(var.type)
    for equation in trace.equations:
        operands = tuple(active[var.index] for var in equation.operands)
        if ops.is_constant(equation.op) or not any(operands):
            continue
        if equation.op.kind == "composite":
            inner = activity(equation.body, operands)
            flags = tuple(_flag(inner, atom) for atom in equation.body.outputs)
        elif equation.op.kind == "structured":
            flags = rules_of(equation).activity(equation, operands)
        else:
            flags = differentiable_outputs(alone(equation), operands)
        for var, flag in zip(equation.outputs, flags, strict=True):
            active[var.index] = flag
    return tuple(active)


def _flag(flags: Mask, atom: Atom) -> bool:
    return isinstance(atom, Var) and flags[atom.index]


def usefulness(trace: Trace, active: Mask, wanted_outputs: Mask) -> Mask:
    """For each variable: is it active, and does a wanted output depend on it?"""
    useful = [False] * len(active)

    def mark(atom: Atom) -> None:
        if isinstance(atom, Var) and active[atom.index]:
            useful[atom.index] = True

    for atom, wanted in zip(trace.outputs, wanted_outputs, strict=True):
        if wanted:
            mark(atom)
    for equation in reversed(trace.equations):
        if not ops.is_constant(equation.op) and any(useful[var.index] for var in equation.outputs):
            for var in equation.operands:
                mark(var)
    return tuple(useful)


@memo(16384)
def contributions(trace: Trace, wanted_inputs: Mask, wanted_outputs: Mask) -> tuple[int, ...]:
    """For each input: how many cotangents are summed up for it, those inside of composites counted."""
    active = activity(trace, wanted_inputs)
    useful = usefulness(trace, active, wanted_outputs)
    counts = [0] * len(active)
    for equation in trace.equations:
        operands = tuple(active[var.index] and useful[var.index] for var in equation.operands)
        outputs = tuple(useful[var.index] for var in equation.outputs)
        if not any(operands) or not any(outputs):
            continue
        is_composite = equation.op.kind == "composite"
        inner = contributions(equation.body, operands, outputs) if is_composite else (1,) * len(operands)
        for var, flag, count in zip(equation.operands, operands, inner, strict=True):
            counts[var.index] += count if flag else 0
    for atom, wanted in zip(trace.outputs, wanted_outputs, strict=True):
        if wanted and isinstance(atom, Var):
            counts[atom.index] += 1
    return tuple(counts[var.index] for var in trace.inputs)
