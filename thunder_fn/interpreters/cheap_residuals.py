"""Residuals that a backward computes again because that is cheaper than reading them.

An executor may fuse pointwise ops. Then a value that such ops compute from values read anyway is
cheaper to compute again than to write and read. A GELU that is written out keeps its input, and not
the cube, the sums and the tanh inside. Values that another op reads, such as a matrix product, are
kept. So are those that are compared for equality, as by the gradient of a maximum: compiled code
may round the second computation otherwise.

Source: min_cut_rematerialization_partition of functorch, which recomputes and keeps by the same two
questions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from thunder_fn.interpreters.simplify import makes_symbols
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import bound
from thunder_fn.ir.flow import Flow
from thunder_fn.ir.memos import kept_of_ops, memo
from thunder_fn.ir.rules import Mask, Split
from thunder_fn.ir.trace import Equation, Op, Trace, TraceBuilder, Var


def recomputable(
    trace: TraceBuilder, late: Collection[int], halves: Split, carried: Sequence[Var]
) -> set[int]:
    """Choose variables of the first half that the second computes again: those that follow cheaply
    from kept values.

    Law: the same gradients, bitwise; the residuals are some of those before.
    """
    whole = READ_WHOLE.over(halves.backward, (True,) * len(halves.backward.outputs))
    known = {constant.var.index for constant in trace.constants} | {
        var.index
        for var, residual, flag in zip(carried, halves.residuals, whole, strict=False)
        if flag or residual.kind != "extra"
    }
    makers = {
        var.index: equation
        for equation in trace.equations
        for var in equation.outputs
        if var.index not in late
    }
    again = set[int]()
    for index in sorted({var.index for var in carried} - known):
        cone = _cone(index, known, makers)
        again.update(var.index for var in bound(cone or ()))
        known.add(index)
    return again


def _cone(
    index: int, known: Collection[int], makers: Mapping[int, Equation]
) -> list[Equation] | None:
    """The equations that compute a variable from known ones, in order; None if one of them is
    not cheap.
    """
    pending, found = [index], dict[int, Equation]()
    while pending:
        index = pending.pop()
        if index in known:
            continue
        maker = makers.get(index)
        if maker is None or not is_cheap(maker):
            return None
        first = maker.outputs[0].index
        if first not in found:
            found[first] = maker
            pending.extend(var.index for var in maker.operands)
    return [found[first] for first in sorted(found)]


def is_cheap(equation: Equation) -> bool:
    """Test whether the equation computes or moves single elements, and may do so again."""
    if ops.has_side_effect(equation) or makes_symbols(equation):
        return False
    match equation.op.kind:
        case "leaf":
            return _is_cheap_op(equation.op)
        case "composite":
            return not ops.is_operator(equation.op) and _is_cheap_body(equation.body)
        case "structured":
            return False


@memo(4096, derives=False)
def _is_cheap_body(trace: Trace) -> bool:
    return all(map(is_cheap, trace.equations))


@kept_of_ops()
def _is_cheap_op(op: Op) -> bool:
    return ops.is_pointwise(op) or ops.is_view(op) or ops.is_factory(op) or op in facts.MOVES


def _read_whole(equation: Equation, results: Mask) -> Mask:
    is_leaf = equation.op.kind == "leaf"
    flag = (
        any(results)
        if is_leaf and ops.is_view(equation.op)
        else not (is_leaf and _is_fused(equation.op))
    )
    return (flag,) * len(equation.operands)


READ_WHOLE = Flow(
    "backward",
    _read_whole,
    opens=lambda equation: equation.op.kind == "composite" and not ops.is_operator(equation.op),
    from_nothing=True,
)
"""The flow of values that some equation reads from memory and no compiled code computes with."""


@kept_of_ops()
def _is_fused(op: Op) -> bool:
    return op not in facts.COMPARES_EXACTLY and (_is_cheap_op(op) or op in facts.REDUCES)
