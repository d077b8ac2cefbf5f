"""Tensors of a trace that are another one in another shape, as the transposed weight in `linear`
is.
"""

from __future__ import annotations

from thunder_fn.ir import facts, ops
from thunder_fn.ir.trace import Equation, TensorType, Trace, TraceBuilder

TRANSPOSE = ops.leaf(ops.aten.t.default)
EXPAND = ops.leaf(ops.aten.expand.default)


def transposed_matrices(trace: Trace) -> frozenset[int]:
    """The variables that are transposes of matrices, as the weight is in `linear`."""
    found: set[int] = set()
    for equation in trace.equations:
        type = equation.outputs[0].type if equation.op == TRANSPOSE else None
        if (
            isinstance(type, TensorType)
            and len(type.shape) == 2
            and equation.operands[0].index not in found
        ):
            found.add(equation.outputs[0].index)
    return frozenset(found)


def reshaped_inputs(forward: TraceBuilder) -> dict[int, Equation]:
    """The equations that give an input another shape, by result: the backward does it again,
    rather than be handed both.
    """
    known, found = {var.index for var in forward.inputs}, dict[int, Equation]()
    for equation in forward.equations:
        if (equation.op in facts.RESHAPES or equation.op == EXPAND) and all(
            var.index in known for var in equation.operands
        ):
            known.update(var.index for var in equation.outputs)
            found.update((var.index, equation) for var in equation.outputs)
    return found
