"""Reverse mode of while_loop.

With `max_steps` the loop is a scan of that length whose steps do nothing once the condition has
failed. Its split is the scan's, and takes time and memory of `max_steps` steps.

Without it nobody knows how long a stack of residuals would be, and the type of a tensor has its
sizes. So the forward counts its steps, and the backward asks `carry_at` for the carry before each
step. That is a buffer which grows where the loop runs, filled by one more forward. Random numbers
are never drawn again, so such a loop may draw none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.grad import add, forward_backward, full, zeros
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.rules import Mask, Residual, Split, chosen, numbered
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Trace,
    TraceBuilder,
    Type,
    Var,
    every_equation,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.carry_at import add_carry_at
from thunder_fn.structured.cond import COND
from thunder_fn.structured.shared.bodies import tensor_type
from thunder_fn.structured.shared.fixpoint import active_carry, carry_fixpoint
from thunder_fn.structured.shared.scan_parts import Loop, add_scan
from thunder_fn.structured.shared.while_parts import BOOL, COUNT, While, add_while

aten = torch.ops.aten


def while_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Split a bounded loop as a scan, an unbounded one with a growing buffer."""
    max_steps = While.of(equation).max_steps
    if max_steps is None:
        return _split_unbounded(equation, wanted_inputs, wanted_outputs)
    return forward_backward(as_scan(equation, max_steps), wanted_inputs, wanted_outputs)


# ---- bounded ----


def as_scan(equation: Equation, max_steps: int) -> Trace:
    """The loop as `max_steps` steps, each of which asks whether it is to be taken."""
    consts, carry = While.of(equation).parts(equation.operand_types)
    builder = TraceBuilder("bounded_while")
    operands = builder.take((*consts, *carry))
    first = full(builder, BOOL, True)
    step = _guarded_step(equation, consts, carry)
    parts = (operands[: len(consts)], (first, *operands[len(consts) :]), ())
    results = add_scan(builder, Loop(0, 0, max_steps), step, parts, equation.source)
    return builder.build(results[1:])


def _guarded_step(equation: Equation, consts: tuple[Type, ...], carry: tuple[Type, ...]) -> Trace:
    # Before: condition: consts, carry -> more        body: consts, carry -> carry
    # After:  step: consts, (alive, carry) -> (alive, carry), which is a scan's body without xs
    condition, body = equation.bodies
    builder = TraceBuilder("guarded_step")
    own_consts, alive, own_carry = builder.take(consts), builder.input(BOOL), builder.take(carry)
    operands = (*own_consts, *own_carry)
    again = _asked_while_alive(builder, condition, alive, operands)
    stay = TraceBuilder("stay")
    kept = stay.take((*consts, *carry))
    bodies = (body, stay.build(kept[len(consts) :]))
    new = builder.add(
        COND, (again, *operands), body.output_types, bodies=bodies, source=equation.source
    )
    return builder.build((again, *new))


def _asked_while_alive(
    builder: TraceBuilder, condition: Trace, alive: Var, operands: tuple[Atom, ...]
) -> Atom:
    """Test whether the loop goes on. A condition that draws random numbers is not asked again
    after the end.
    """
    if ops.has_effects(condition):
        never = TraceBuilder("never")
        never.take(condition.input_types)
        bodies = (condition, never.build((full(never, BOOL, False),)))
        return builder.add(COND, (alive, *operands), (BOOL,), bodies=bodies)[0]
    (more,) = inline_into(builder, condition, operands)
    return ops.emit(builder, aten.logical_and.default, (alive, more), BOOL)


# ---- unbounded ----


@dataclass(frozen=True, slots=True)
class _Step:
    """The split of one step, and whose cotangents are carried back."""

    split: Split
    summed: tuple[int, ...]
    live: tuple[int, ...]
    consts_places: tuple[int | None, ...]
    carry_places: tuple[int | None, ...]


def _split_unbounded(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    loop = While.of(equation)
    if any(_draws(body) or ops.calls_back(body) for body in equation.bodies):
        what = (
            "while_loop: reverse mode without max_steps runs the steps again, and these draw random"
            " numbers or call back"
        )
        fix = "Give the loop max_steps=, which keeps what they gave."
        raise MissingRule(what, source=equation.source, fix=fix)
    step = _split_step(equation, loop, wanted_inputs, wanted_outputs)
    builder = TraceBuilder("while_backward")
    # Before: equation: consts, carry -> carry
    # After:  forward:  consts, carry -> carry, steps
    #         backward: consts, first carry, steps, wanted carry cts -> gradients
    operands = builder.take(equation.operand_types)
    steps = builder.input(COUNT)
    given = {
        i: builder.input(equation.outputs[i].type) for i, flag in enumerate(wanted_outputs) if flag
    }
    consts, carry = loop.parts(operands)
    start = [
        given[i] if i in given else zeros(builder, tensor_type(carry[i].type)) for i in step.live
    ]
    sums = [zeros(builder, tensor_type(consts[i].type)) for i in step.summed]
    bodies = _backward_bodies(equation, loop, step)
    results = add_while(builder, bodies, operands, (steps, *start, *sums), None, equation.source)[
        1:
    ]
    found: list[Atom | None] = [
        results[len(start) + step.summed.index(i)] if i in step.summed else None
        for i in range(len(consts))
    ]
    found += [results[step.live.index(i)] if i in step.live else None for i in range(len(carry))]
    asked = chosen(found, wanted_inputs)
    used = tuple(atom for atom in asked if atom is not None)
    residuals = (*(Residual("input", i) for i in range(len(operands))), Residual("extra", 0))
    gradients = numbered(atom is not None for atom in asked)
    return Split(_counting(equation, loop), dce(builder.build(used)), residuals, gradients)


def _draws(body: Trace) -> bool:
    """Test whether it draws random numbers."""
    leaves = (equation.op for equation in every_equation(body) if equation.op.kind == "leaf")
    return any(map(ops.is_random, leaves))


def _split_step(
    equation: Equation, loop: While, wanted_inputs: Mask, wanted_outputs: Mask
) -> _Step:
    body = equation.bodies[1]
    consts, _ = loop.parts(wanted_inputs)
    asked = (*consts, *active_carry(body, *loop.parts(wanted_inputs)))

    def places_of(live: Mask) -> tuple[int | None, ...]:
        return forward_backward(body, asked, live).places(asked)

    live = carry_fixpoint(
        lambda mask: tuple(place is not None for place in loop.parts(places_of(mask))[1]),
        wanted_outputs,
    )
    consts_places, carry_places = loop.parts(places_of(live))
    summed = tuple(i for i, place in enumerate(consts_places) if place is not None)
    return _Step(
        forward_backward(body, asked, live),
        summed,
        tuple(i for i, flag in enumerate(live) if flag),
        consts_places,
        carry_places,
    )


def _counting(equation: Equation, loop: While) -> Trace:
    """The loop, and the number of its steps."""
    builder = TraceBuilder("while_forward")
    operands = builder.take(equation.operand_types)
    consts, carry = loop.parts(operands)
    bodies = _counting_bodies(equation, loop)
    count, *results = add_while(
        builder, bodies, consts, (full(builder, COUNT, 0), *carry), None, equation.source
    )
    return builder.build((*results, count))


def _counting_bodies(equation: Equation, loop: While) -> tuple[Trace, Trace]:
    """Condition and body with a counter before the carry."""
    # Before: consts, carry -> more           consts, carry -> carry
    # After:  consts, count, carry -> more    consts, count, carry -> count + 1, carry
    consts, carry = loop.parts(equation.operand_types)
    condition, body = (TraceBuilder(trace.name) for trace in equation.bodies)
    inputs = [builder.take((*consts, COUNT, *carry)) for builder in (condition, body)]
    more, results = (
        inline_into(builder, trace, (*own[: len(consts)], *own[len(consts) + 1 :]))
        for builder, trace, own in zip((condition, body), equation.bodies, inputs, strict=True)
    )
    count = inputs[1][len(consts)]
    next_count = ops.emit(body, aten.add.Scalar, (count, 1), COUNT)
    return condition.build(more), body.build((next_count, *results))


def _backward_bodies(equation: Equation, loop: While, step: _Step) -> tuple[Trace, Trace]:
    """The bodies of the loop from the last step to the first: the carry before the step, then one
    step of the body backwards.

    Consts are the operands of the loop; carries are the number of steps left, cotangents, and sums
    for the consts.
    """
    # Before: body: consts, carry -> carry, and its split: residuals, live carry cts -> gradients
    # After:  condition: consts, first carry, (left, live carry cts, sums) -> left > 0
    #         step back: the same -> (left - 1, live carry cts, sums)
    types = equation.operand_types
    consts, carry = loop.parts(types)
    carried = (COUNT, *(carry[i] for i in step.live), *(consts[i] for i in step.summed))
    condition = TraceBuilder("steps_left")
    inputs = condition.take((*types, *carried))
    more = ops.emit(condition, aten.gt.Scalar, (inputs[len(types)], 0), BOOL)
    builder = TraceBuilder("step_back")
    operands, left = builder.take(types), builder.input(COUNT)
    cotangents = builder.take(carry[i] for i in step.live)
    sums = builder.take(consts[i] for i in step.summed)
    own_consts, first = loop.parts(operands)
    index = ops.emit(builder, aten.sub.Scalar, (left, 1), COUNT)
    before = add_carry_at(builder, equation.bodies[1], index, own_consts, first, equation.source)
    arguments = (*own_consts, *before)
    results = inline_into(builder, step.split.forward, arguments)
    values = step.split.residual_values(arguments, results)
    found = inline_into(builder, step.split.backward, (*values, *cotangents))
    new: list[Atom] = []
    for i in step.live:
        place = step.carry_places[i]
        new.append(zeros(builder, tensor_type(carry[i])) if place is None else found[place])
    for total, i in zip(sums, step.summed, strict=True):
        place = step.consts_places[i]
        new.append(total if place is None else add(builder, total, found[place]))
    return condition.build((more,)), dce(builder.build((index, *new)))
