"""Tangents that are zero, left out of the rules of forward mode.

PyTorch's formulas take tensors of zeros for the tangents that an op's operands do not have, and
multiply them as any other: half of the products in the tangent of `linear` by a constant weight.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

from thunder_fn.interpreters.grad import zeros
from thunder_fn.interpreters.noops import drop_noops
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts, ops
from thunder_fn.ir.memos import kept_of_ops
from thunder_fn.ir.rules import JvpRule
from thunder_fn.ir.trace import Arg, Atom, Equation, Literal, TensorType, TraceBuilder, Var
from thunder_fn.ir.walking import put, walk

Known: TypeAlias = tuple[Atom, bool]
"""A value, and whether it is zero everywhere."""


@kept_of_ops(65536)
def without_zeros(rule: JvpRule) -> JvpRule:
    """Return a rule that computes nothing from zeros.

    Law: the same values, and the same tangents where all values are finite. Zero times an infinity
        is zero here, as for reverse mode, and for JAX. The tangents that PyTorch gives stay, also
        those of `floor`, which are zero: its result depends on its operand.
    """
    # Before: x, w, x_t -> x @ w, x_t @ w + x @ zeros
    # After:  x, w, x_t -> x @ w, x_t @ w
    builder = TraceBuilder(rule.trace.name)
    inputs: list[Known] = [(var, False) for var in builder.take(rule.trace.input_types)]
    step = partial(_step, builder)
    found = walk(builder, rule.trace, inputs, step, lift=lambda atom: (atom, False))
    return JvpRule(
        dce(drop_noops(builder.build(tuple(atom for atom, _ in found)))), rule.active_outputs
    )


def _step(builder: TraceBuilder, equation: Equation, operands: tuple[Known, ...]) -> list[Known]:
    atoms = tuple(atom for atom, _ in operands)
    if equation.op in facts.ZEROS:
        return [(var, True) for var in put(builder, equation, atoms)]
    if not any(is_zero for _, is_zero in operands):
        return [(var, False) for var in put(builder, equation, atoms)]
    absent = dict(zip(equation.operands, (is_zero for _, is_zero in operands), strict=True))
    are_zero = [_is_zero(equation, place, absent) for place in range(len(equation.outputs))]
    term = _other_term(equation, operands)
    if term is not None and not any(are_zero):
        return [(term, False)]
    if equation.op in facts.ADDS_LAST and operands[-1][1]:
        atoms = (*atoms[:-1], Literal(None))
    found = put(builder, equation, atoms)
    return [
        (zeros(builder, var.type), True)
        if is_zero and isinstance(var.type, TensorType)
        else (var, False)
        for var, is_zero in zip(found, are_zero, strict=True)
    ]


def _is_zero(equation: Equation, place: int, absent: dict[Var, bool]) -> bool:
    """Test whether a result is zero everywhere, if it is a tensor."""
    sets = ops.linear_in(equation.op, place)
    return any(_are_zero(tuple(equation.args[p : p + 1] for p in one), absent) for one in sets)


def _are_zero(arg: Arg, absent: dict[Var, bool]) -> bool:
    if isinstance(arg, tuple):
        return all(_are_zero(item, absent) for item in arg)
    return absent[arg] if isinstance(arg, Var) else arg.value is None or arg.value == 0


def _other_term(equation: Equation, operands: tuple[Known, ...]) -> Atom | None:
    """The term of a sum whose other term is zero; None if the sum changes more than that."""
    if equation.op not in facts.ADDS or len(operands) != 2:
        return None
    (first, first_is_zero), (second, _) = operands
    kept = second if first_is_zero else first
    changes = first_is_zero and (equation.op.name != "aten.add.Tensor" or equation.kwargs)
    same = isinstance(kept, Var) and kept.type == equation.outputs[0].type
    return kept if same and not changes else None
