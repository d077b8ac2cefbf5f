"""Forward mode: a trace on primals becomes a trace on primals and tangents.

Leaf rules are derived (`derived/leaf_jvp.py`); a composite's jvp is its body's, once for each
distinct body and question. Tangents that are zero are absent, never tensors of zeros.

Zeros are left out of leaf rules, too. PyTorch's formulas take tensors of zeros for the tangents
that an op's operands do not have, and multiply them as any other: half of the products in the
tangent of `linear` by a constant weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from thunder_fn.derived.activity import ACTIVE
from thunder_fn.derived.leaf_jvp import jvp_rule, missing_jvp
from thunder_fn.derived.leaf_vjp import alone, is_differentiable
from thunder_fn.derived.quirks.collectives import check_stays
from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.grad import forward_backward, type_of_cotangent, zeros
from thunder_fn.interpreters.noops import drop_noops
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import finds_numbers, fixes_numbers
from thunder_fn.ir.memos import kept_of_ops, memo
from thunder_fn.ir.pairs import Companion, through_bodies
from thunder_fn.ir.rules import JVP, JvpRule, Mask, chosen, scattered
from thunder_fn.ir.trace import (
    Arg,
    Atom,
    Equation,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
)
from thunder_fn.ir.walking import inline_into, put, walk


@memo(16384)
def jvp_trace(trace: Trace, active: Mask) -> JvpRule:
    """The jvp with zeros left out.

    Args:
        active: one per input; True where a tangent is given.

    Returns:
        A rule whose trace maps the inputs, then the tangents of the active inputs, to the outputs,
            then the tangents of those outputs that `active_outputs` marks; the others' tangents are
            zero.
    """
    for op, stand_in in _STAND_INS.items():
        if _has_op(trace, op):
            rule = jvp_trace(_with_op(trace, op, stand_in), active)
            return JvpRule(_with_op(rule.trace, stand_in, op), rule.active_outputs)
    builder = TraceBuilder(f"{trace.name}_jvp")
    primals = builder.take(trace.input_types)
    given = [
        flag and is_differentiable(var.type) for var, flag in zip(trace.inputs, active, strict=True)
    ]
    tangents = builder.take_some(trace.input_types, given)
    duals = _push_all(builder, trace, list(zip(primals, tangents, strict=True)))
    found = (tangent for _, tangent in duals if tangent is not None)
    moved = tuple(tangent is not None for _, tangent in duals)
    return JvpRule(builder.build((*(primal for primal, _ in duals), *found)), moved)


_MOVES = ops.leaf(torch.ops.aten.lift.default)
"""Stand-in for `NO_GRAD` while a trace is pushed forward, where it is no constant."""
_STAND_INS = {ops.NO_GRAD: _MOVES, ops.NO_GRAD_WRITE: ops.PUSHED_WRITE}


@memo(16384)
def _has_op(trace: Trace, op: Op) -> bool:
    """Tell whether an equation of the trace, or of a body in it, has this op.

    Identity of a trace with what a memo answered tells nothing: the answer is that of an equal
    trace.
    """
    return any(
        eq.op == op or any(_has_op(body, op) for body in eq.bodies) for eq in trace.equations
    )


@memo(16384)
def _with_op(trace: Trace, old: Op, new: Op) -> Trace:
    """The trace with one op in place of another, in bodies too."""
    if not _has_op(trace, old):
        return trace
    return replace(
        trace, equations=tuple(_renamed(equation, old, new) for equation in trace.equations)
    )


def _renamed(equation: Equation, old: Op, new: Op) -> Equation:
    if equation.op != old and not equation.bodies:
        return equation
    bodies = tuple(_with_op(body, old, new) for body in equation.bodies)
    return replace(equation, op=new if equation.op == old else equation.op, bodies=bodies)


def _no_grad_rule(equation: Equation) -> JvpRule:
    """The tangent goes on; to reverse mode both are constants."""
    builder = TraceBuilder("no_grad")
    type = equation.outputs[0].type
    pair = (builder.input(type), builder.input(type))
    return JvpRule(
        builder.build(tuple(builder.add(ops.NO_GRAD, (value,), (type,))[0] for value in pair)),
        (True,),
    )


Dual: TypeAlias = tuple[Atom, Atom | None]
"""A primal and its tangent, None where that is zero."""


def _push(builder: TraceBuilder, equation: Equation, operands: tuple[Dual, ...]) -> list[Dual]:
    primals = tuple(primal for primal, _ in operands)
    tangents = tuple(tangent for _, tangent in operands if tangent is not None)
    if tangents:
        check_stays(equation)
    if (
        not tangents
        or ops.is_constant(equation.op)
        or not any(is_differentiable(v.type) for v in equation.outputs)
    ):
        return [(value, None) for value in put(builder, equation, primals)]
    if equation.op.kind == "structured" and JVP.find(equation.op) is None:
        slots = [
            (primal,) if tangent is None else (primal, tangent) for primal, tangent in operands
        ]
        found = through_bodies(builder, equation, slots, TANGENTS)
        return [(one[0], one[1] if len(one) > 1 else None) for one in found]
    rule = rule_of(equation, tuple(tangent is not None for _, tangent in operands))
    if equation.op.kind == "composite":
        op = ops.composite(f"{ops.short_name(equation.op)}_jvp")
        types = rule.trace.output_types
        results: tuple[Atom, ...] = builder.add(
            op, (*primals, *tangents), types, bodies=(rule.trace,), source=equation.source
        )
    else:
        results = inline_into(builder, rule.trace, (*primals, *tangents), equation.source)
    found = scattered(results[len(equation.outputs) :], rule.active_outputs)
    return list(zip(results, found, strict=False))


def _push_all(builder: TraceBuilder, trace: Trace, arguments: Sequence[Dual]) -> tuple[Dual, ...]:
    return walk(builder, trace, arguments, partial(_push, builder), lift=lambda atom: (atom, None))


@memo(16384)
def _on_slots(trace: Trace, active: Mask, wanted: Mask) -> Trace:
    """Return the jvp of a body, each tangent behind its primal; zeros where an output that must
    have one has none.
    """
    # Before: a, b, c -> x, y
    # After:  a, a_t, b, c, c_t -> x, x_t, y    for active a and c, wanted x
    builder = TraceBuilder(f"{trace.name}_jvp")
    arguments: list[Dual] = []
    for var, flag in zip(trace.inputs, active, strict=True):
        primal = builder.input(var.type)
        arguments.append((primal, builder.input(var.type) if flag else None))
    outputs: list[Atom] = []
    for (primal, tangent), flag in zip(_push_all(builder, trace, arguments), wanted, strict=True):
        outputs.append(primal)
        if flag:
            outputs += (tangent,) if tangent is not None else _zero_tangent(builder, primal)
    return builder.build(tuple(outputs))


def _zero_tangent(builder: TraceBuilder, atom: Atom) -> tuple[Atom, ...]:
    return (zeros(builder, type_of_cotangent(atom)),)


TANGENTS = Companion(
    ACTIVE,
    lambda trace, active, wanted: _on_slots(trace, active, wanted),
    _zero_tangent,
    lambda type: (type,),
)
"""Forward mode through structured ops: a tangent of the primal's own type beside each active
value.
"""


def rule_of(equation: Equation, active: Mask) -> JvpRule:
    """The jvp of an equation: a composite's is its body's, a leaf's is derived."""
    if equation.op.kind == "composite":
        return jvp_trace(equation.body, active)
    if equation.op.kind == "structured":
        rule = JVP.find(equation.op)
        return jvp_trace(alone(equation), active) if rule is None else rule(equation, active)
    if equation.op in (_MOVES, ops.NO_GRAD):
        return _no_grad_rule(equation)
    return without_zeros(_leaf_rule(alone(equation), active))


def _leaf_rule(single: Trace, active: Mask) -> JvpRule:
    equation = single.equations[0]
    rule = jvp_rule(single, active)
    if fixes_numbers(rule.trace) if isinstance(rule, JvpRule) else _saves_for_constants(single):
        with suppress(MissingRule):
            return transposed_twice(single, active)
    if isinstance(rule, JvpRule):
        return rule
    if isinstance(rule, Trace):
        with suppress(MissingRule):
            return jvp_trace(rule, active) if ops.draws(equation) else _beside(single, rule, active)
    try:
        return transposed_twice(single, active)
    except MissingRule:
        raise missing_jvp(single) from None


def _saves_for_constants(single: Trace) -> bool:
    """Test whether the parts of a backward take saved values for constants; PyTorch's formula,
    which does not, wants numbers.
    """
    return "_backward." in single.equations[0].op.name and finds_numbers(single)


@memo(4096)
def _beside(single: Trace, parts: Trace, active: Mask) -> JvpRule:
    """The tangents are those of the parts, the values bitwise those of the op."""
    rule = jvp_trace(parts, active)
    builder = TraceBuilder(rule.trace.name)
    arguments = builder.take(rule.trace.input_types)
    count = len(single.inputs)
    values = inline_into(builder, single, arguments[:count])
    tangents = inline_into(builder, rule.trace, arguments)[len(single.outputs) :]
    return JvpRule(dce(builder.build((*values, *tangents))), rule.active_outputs)


@memo(4096)
def transposed_twice(trace: Trace, active: Mask) -> JvpRule:
    """The jvp from two vjps: the backward is linear in the cotangents, and its vjp with respect to
    them is the jvp.

    Source: J. Townsend, "A new trick for calculating Jacobian vector products", 2017.
    """
    # Before: backward(residuals, cts) is linear in cts: gradients = J^T cts
    # After:  its own backward with respect to cts, given tangents for the gradients: J tangents
    wanted = tuple(is_differentiable(var.type) for var in trace.equations[-1].outputs)
    split = forward_backward(trace, active, wanted)
    builder = TraceBuilder(f"{trace.name}_jvp")
    primals = builder.take(trace.input_types)
    tangents = builder.take(chosen(trace.input_types, active))
    results = inline_into(builder, split.forward, primals)
    residuals = split.residual_values(primals, results)
    given = [zeros(builder, type_of_cotangent(atom)) for atom in chosen(trace.outputs, wanted)]
    linear = (False,) * len(residuals) + (True,) * len(given)
    back = forward_backward(split.backward, linear, (True,) * len(split.backward.outputs))
    linearized = inline_into(builder, back.forward, (*residuals, *given))
    saved = back.residual_values((*residuals, *given), linearized)
    used = chosen(tangents, [place is not None for place in split.gradients])
    found = inline_into(builder, back.backward, (*saved, *used))
    moved = tuple(place is not None for place in back.places(wanted))
    return JvpRule(dce(builder.build((*results[: len(trace.outputs)], *found))), moved)


@memo(1024)
def jvp(trace: Trace, active: Mask) -> Trace:
    """A trace on primals and tangents.

    Law: its tangents are the derivative of the outputs along the given tangents; linear in them.

    Args:
        active: one per input; True where a tangent is given. Only floating and complex inputs have
            one.

    Returns:
        The trace from the inputs, then one tangent for each active input, to the outputs, then one
            tangent for each floating or complex output, zeros where it does not depend on the
            active inputs.
    """
    rule = jvp_trace(trace, active)
    builder = TraceBuilder(f"{trace.name}_jvp")
    inputs = builder.take(rule.trace.input_types)
    results = inline_into(builder, rule.trace, inputs)
    supply = iter(results[len(trace.outputs) :])
    tangents = tuple(
        next(supply) if moved else zeros(builder, type_of_cotangent(atom))
        for atom, moved in zip(trace.outputs, rule.active_outputs, strict=True)
        if isinstance(atom, Var) and is_differentiable(atom.type)
    )
    return dce(builder.build((*results[: len(trace.outputs)], *tangents)))


# ---- tangents that are zero ----


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
