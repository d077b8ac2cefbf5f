"""Activity and usefulness, before reverse mode: variables that have derivatives, and those whose
derivatives are asked for.
"""

from __future__ import annotations

from thunder_fn.derived.leaf_vjp import alone, differentiable_outputs, is_differentiable
from thunder_fn.derived.quirks.collectives import check_stays
from thunder_fn.errors import MissingRule
from thunder_fn.ir import ops
from thunder_fn.ir.flow import Flow
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import Mask
from thunder_fn.ir.trace import Equation, Trace, Var


def _active_results(equation: Equation, active: Mask) -> Mask:
    check_stays(equation)
    if ops.is_constant(equation.op):
        return (False,) * len(equation.outputs)
    if equation.op.kind == "structured":
        raise MissingRule(
            f"activity: there is no wiring for the structured op {equation.op}",
            source=equation.source,
            fix=(
                "Import the module that defines the op, or register a wiring for it"
                " (`thunder_fn.ir.wiring`)."
            ),
        )
    return differentiable_outputs(alone(equation), active)


def _useful_operands(equation: Equation, useful: Mask) -> Mask:
    return (not ops.is_constant(equation.op),) * len(equation.operands)


ACTIVE = Flow(
    "forward",
    _active_results,
    only=lambda var: is_differentiable(var.type),
    opens=lambda equation: not ops.is_constant(equation.op),
)
"""The flow of activity: a variable depends, differentiably, on a wanted input."""
USEFUL = Flow(
    "backward",
    lambda equation, useful: _useful_operands(equation, useful),
    opens=lambda equation: False,
)
"""The flow of usefulness: a wanted output depends on a variable. Composites are taken whole."""


activity = ACTIVE.everywhere
"""(trace, wanted_inputs) -> for each variable by index: does it depend, differentiably, on a
wanted input?
"""


def usefulness(trace: Trace, active: Mask, wanted_outputs: Mask) -> Mask:
    """Tell for each variable whether it is active and a wanted output depends on it."""
    return USEFUL.everywhere(trace, wanted_outputs, active)


@memo(16384)
def contributions(trace: Trace, wanted_inputs: Mask, wanted_outputs: Mask) -> tuple[int, ...]:
    """Count for each input the cotangents that are summed up for it, those inside of composites
    included.
    """
    active = activity(trace, wanted_inputs)
    useful = usefulness(trace, active, wanted_outputs)
    counts = [0] * len(active)
    for equation in trace.equations:
        operands = tuple(active[var.index] and useful[var.index] for var in equation.operands)
        outputs = tuple(useful[var.index] for var in equation.outputs)
        if not any(operands) or not any(outputs):
            continue
        is_composite = equation.op.kind == "composite"
        inner = (
            contributions(equation.body, operands, outputs)
            if is_composite
            else (1,) * len(operands)
        )
        for var, flag, count in zip(equation.operands, operands, inner, strict=True):
            counts[var.index] += count if flag else 0
    for atom, wanted in zip(trace.outputs, wanted_outputs, strict=True):
        if wanted and isinstance(atom, Var):
            counts[atom.index] += 1
    return tuple(counts[var.index] for var in trace.inputs)
