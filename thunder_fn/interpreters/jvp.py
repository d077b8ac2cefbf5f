"""Forward mode: a trace on primals becomes a trace on primals and tangents.

Leaf rules are derived (`derive_jvp.py`); a composite's jvp is its body's, once for each distinct body and question.
Tangents that are zero are absent, never tensors of zeros.
"""

from __future__ import annotations

from contextlib import suppress

from thunder_fn import ops
from thunder_fn.constraints import finds_numbers, fixes_numbers
from thunder_fn.derive import alone, is_differentiable
from thunder_fn.derive_jvp import jvp_rule, missing_jvp
from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.simplify import dce, inline_into
from thunder_fn.interpreters.vjp import split_vjp, type_of_cotangent, zeros
from thunder_fn.rules import JvpRule, Mask, memo, rules_of
from thunder_fn.trace import Atom, Equation, Trace, TraceBuilder, Var


@memo(16384)
def push_forward(trace: Trace, active: Mask) -> JvpRule:
    """The jvp with zeros left out.

    Args:
        active: one per input; True where a tangent is given.

    Returns:
        A rule whose trace maps the inputs, then the tangents of the active inputs, to the outputs, then the tangents
        of those outputs that `active_outputs` marks; the others' tangents are zero.
    """
    builder = TraceBuilder(f"{trace.name}_jvp")
    builder.require(trace.constraints)
    primals: dict[int, Atom] = {var.index: builder.input(var.type) for var in trace.inputs}
    tangents: dict[int, Atom] = {}
    for var, flag in zip(trace.inputs, active, strict=True):
        if flag and is_differentiable(var.type):
            tangents[var.index] = builder.input(var.type)
    for constant in trace.constants:
        primals[constant.var.index] = builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
    for equation in trace.equations:
        _push_equation(builder, equation, primals, tangents)
    outputs = tuple(primals[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs)
    moved = tuple(isinstance(atom, Var) and atom.index in tangents for atom in trace.outputs)
    found = (tangents[atom.index] for atom in trace.outputs if isinstance(atom, Var) and atom.index in tangents)
    return JvpRule(builder.build((*outputs, *found)), moved)


def _push_equation(
    builder: TraceBuilder, equation: Equation, primals: dict[int, Atom], tangents: dict[int, Atom]
) -> None:
    active = tuple(var.index in tangents for var in equation.operands)
    if not any(active) or ops.is_constant(equation.op) or not any(is_differentiable(v.type) for v in equation.outputs):
        results: tuple[Atom, ...] = builder.copy(equation, lambda var: primals[var.index])
        primals.update((var.index, value) for var, value in zip(equation.outputs, results, strict=True))
        return
    rule = rule_of(equation, active)
    arguments = (
        *(primals[var.index] for var in equation.operands),
        *(tangents[var.index] for var in equation.operands if var.index in tangents),
    )
    if equation.op.kind == "composite":
        op = ops.composite(f"{ops.short_name(equation.op)}_jvp")
        results = builder.add(op, arguments, rule.trace.output_types, bodies=(rule.trace,), source=equation.source)
    else:
        results = inline_into(builder, rule.trace, arguments, equation.source)
    count = len(equation.outputs)
    primals.update((var.index, value) for var, value in zip(equation.outputs, results[:count], strict=True))
    moved = (var for var, flag in zip(equation.outputs, rule.active_outputs, strict=True) if flag)
    tangents.update((var.index, value) for var, value in zip(moved, results[count:], strict=True))


def rule_of(equation: Equation, active: Mask) -> JvpRule:
    """The jvp of an equation: a composite's is its body's, a leaf's is derived."""
    if equation.op.kind == "composite":
        return push_forward(equation.body, active)
    if equation.op.kind == "structured":
        return rules_of(equation).jvp(equation, active)
    single = alone(equation)
    rule = jvp_rule(single, active)
    if fixes_numbers(rule.trace) if isinstance(rule, JvpRule) else _saves_for_constants(single):
        with suppress(MissingRule):
            return transposed_twice(single, active)
    if isinstance(rule, JvpRule):
        return rule
    if isinstance(rule, Trace):
        with suppress(MissingRule):
            return push_forward(rule, active) if ops.draws(equation) else _beside(single, rule, active)
    try:
        return transposed_twice(single, active)
    except MissingRule:
        raise missing_jvp(single) from None


def _saves_for_constants(single: Trace) -> bool:
    """The parts of a backward take what the forward saved for constants; PyTorch's formula, which does not, wants numbers."""
    return "_backward." in single.equations[0].op.name and finds_numbers(single)


@memo(4096)
def _beside(single: Trace, parts: Trace, active: Mask) -> JvpRule:
    """The tangents are those of the parts, the values bitwise those of the op."""
    rule = push_forward(parts, active)
    builder = TraceBuilder(rule.trace.name)
    arguments = tuple(builder.input(type) for type in rule.trace.input_types)
    count = len(single.inputs)
    values = inline_into(builder, single, arguments[:count])
    tangents = inline_into(builder, rule.trace, arguments)[len(single.outputs) :]
    return JvpRule(dce(builder.build((*values, *tangents))), rule.active_outputs)


@memo(4096)
def transposed_twice(trace: Trace, active: Mask) -> JvpRule:
    """The jvp from two vjps: the backward is linear in the cotangents, and its vjp with respect to them is the jvp.

    Source: J. Townsend, "A new trick for calculating Jacobian vector products", 2017.
    """
    wanted = tuple(is_differentiable(var.type) for var in trace.equations[-1].outputs)
    split = split_vjp(trace, active, wanted)
    builder = TraceBuilder(f"{trace.name}_jvp")
    primals = tuple(builder.input(var.type) for var in trace.inputs)
    asked = [var for var, flag in zip(trace.inputs, active, strict=True) if flag]
    tangents = [builder.input(var.type) for var in asked]
    results = inline_into(builder, split.forward, primals)
    residuals = split.residual_values(primals, results)
    given = [zeros(builder, type_of_cotangent(atom)) for atom, flag in zip(trace.outputs, wanted, strict=True) if flag]
    linear = (False,) * len(residuals) + (True,) * len(given)
    back = split_vjp(split.backward, linear, (True,) * len(split.backward.outputs))
    linearized = inline_into(builder, back.forward, (*residuals, *given))
    saved = back.residual_values((*residuals, *given), linearized)
    used = [tangent for tangent, place in zip(tangents, split.gradients, strict=True) if place is not None]
    found = inline_into(builder, back.backward, (*saved, *used))
    places_out = iter(back.gradients)
    moved = tuple(flag and next(places_out) is not None for flag in wanted)
    return JvpRule(dce(builder.build((*results[: len(trace.outputs)], *found))), moved)


@memo(1024)
def jvp(trace: Trace, active: Mask) -> Trace:
    """A trace on primals and tangents.

    Law: its tangents are the derivative of the outputs along the given tangents; linear in them.

    Args:
        active: one per input; True where a tangent is given. Only floating and complex inputs have one.

    Returns:
        The trace from the inputs, then one tangent for each active input, to the outputs, then one tangent for each
        floating or complex output, zeros where it does not depend on the active inputs.
    """
    rule = push_forward(trace, active)
    builder = TraceBuilder(f"{trace.name}_jvp")
    inputs = tuple(builder.input(var.type) for var in rule.trace.inputs)
    results = inline_into(builder, rule.trace, inputs)
    supply = iter(results[len(trace.outputs) :])
    tangents = tuple(
        next(supply) if moved else zeros(builder, type_of_cotangent(atom))
        for atom, moved in zip(trace.outputs, rule.active_outputs, strict=True)
        if isinstance(atom, Var) and is_differentiable(atom.type)
    )
    return dce(builder.build((*results[: len(trace.outputs)], *tangents)))
