"""Reverse mode of while_loop.

With `max_steps` the loop is a scan of that length whose steps do nothing once the condition has failed, and its split
is the scan's: time and memory of `max_steps` steps.

Without it nobody knows how long a stack of residuals would be, and the type of a tensor has its sizes. So the forward
counts its steps, and the backward computes the carry before step i anew, from the first carry, for each i: memory of
one step, and time that grows with the square of the number of steps. Both are equations like any others, so everything
can be asked of them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from thunder_fn import ops
from thunder_fn.interpreters.simplify import dce, inline_into
from thunder_fn.interpreters.vjp import add, full, split_vjp, zeros
from thunder_fn.rules import Mask, Residual, Split
from thunder_fn.structured.bodies import body_activity, tensor_type
from thunder_fn.structured.cond import COND
from thunder_fn.structured.fixpoint import carry_fixpoint
from thunder_fn.structured.loop import Loop, add_scan
from thunder_fn.trace import Atom, Equation, Literal, Op, Source, TensorType, Trace, TraceBuilder, Type, Var

T = TypeVar("T")
aten = torch.ops.aten

WHILE = Op("structured", "while_loop")
BOOL = TensorType(torch.bool, ())
COUNT = TensorType(torch.int64, ())
"""The type of step counters: they are on the CPU, where a loop's condition costs nothing."""


@dataclass(frozen=True, slots=True)
class While:
    """The literals of a while_loop: how many operands are consts, and after how many steps it ends in any case."""

    num_consts: int
    max_steps: int | None = None

    @staticmethod
    def of(equation: Equation) -> While:
        """The literals of an equation."""
        return While(**{key: arg.value for key, arg in equation.kwargs if isinstance(arg, Literal)})

    def parts(self, operands: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """Operands, or what is known of each, as those of the consts and of the carries."""
        return tuple(operands[: self.num_consts]), tuple(operands[self.num_consts :])


def add_while(
    builder: TraceBuilder,
    bodies: tuple[Trace, Trace],
    consts: Sequence[Atom],
    carry: Sequence[Atom],
    max_steps: int | None,
    source: Source | None,
) -> tuple[Var, ...]:
    """Append a while_loop of a condition and a body."""
    kwargs = (("num_consts", Literal(len(consts))), ("max_steps", Literal(max_steps)))
    types = bodies[1].output_types
    return builder.add(WHILE, (*consts, *carry), types, kwargs=kwargs, bodies=bodies, source=source)


def active_carry(loop: While, body: Trace, active: Mask) -> Mask:
    """Which carries are active in some step, if these operands are."""
    consts, carry = loop.parts(active)
    return carry_fixpoint(lambda mask: body_activity(body, (*consts, *mask)), carry)


def while_split_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """As a scan where the number of steps is bounded, by replay where it is not."""
    max_steps = While.of(equation).max_steps
    if max_steps is None:
        return _split_by_replay(equation, wanted_inputs, wanted_outputs)
    return split_vjp(as_scan(equation, max_steps), wanted_inputs, wanted_outputs)


# ---- bounded ----


def as_scan(equation: Equation, max_steps: int) -> Trace:
    """The loop as `max_steps` steps, each of which asks whether it is to be taken."""
    consts, carry = While.of(equation).parts(tuple(var.type for var in equation.operands))
    builder = TraceBuilder("bounded_while")
    operands = [builder.input(type) for type in (*consts, *carry)]
    first = full(builder, BOOL, True)
    step = _guarded_step(equation, consts, carry)
    parts = (tuple(operands[: len(consts)]), (first, *operands[len(consts) :]), ())
    results = add_scan(builder, Loop(0, 0, max_steps), step, parts, equation.source)
    return builder.build(results[1:])


def _guarded_step(equation: Equation, consts: tuple[Type, ...], carry: tuple[Type, ...]) -> Trace:
    condition, body = equation.bodies
    builder = TraceBuilder("guarded_step")
    own_consts = [builder.input(type) for type in consts]
    alive = builder.input(BOOL)
    own_carry = [builder.input(type) for type in carry]
    operands = (*own_consts, *own_carry)
    (more,) = inline_into(builder, condition, operands)
    (again,) = builder.add(ops.leaf(aten.logical_and.default), (alive, more), (BOOL,))
    stay = TraceBuilder("stay")
    kept = tuple(stay.input(type) for type in (*consts, *carry))
    bodies = (body, stay.build(kept[len(consts) :]))
    new = builder.add(COND, (again, *operands), body.output_types, bodies=bodies, source=equation.source)
    return builder.build((again, *new))


# ---- unbounded ----


@dataclass(frozen=True, slots=True)
class _Step:
    """The split of one step, and whose cotangents are carried back."""

    split: Split
    summed: tuple[int, ...]
    live: tuple[int, ...]
    consts_places: tuple[int | None, ...]
    carry_places: tuple[int | None, ...]


def _split_by_replay(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    loop = While.of(equation)
    step = _split_step(equation, loop, wanted_inputs, wanted_outputs)
    builder = TraceBuilder("while_backward")
    operands = [builder.input(var.type) for var in equation.operands]
    steps = builder.input(COUNT)
    given = {i: builder.input(equation.outputs[i].type) for i, flag in enumerate(wanted_outputs) if flag}
    consts, carry = loop.parts(operands)
    start = [given[i] if i in given else zeros(builder, tensor_type(carry[i].type)) for i in step.live]
    sums = [zeros(builder, tensor_type(consts[i].type)) for i in step.summed]
    bodies = _backward_bodies(equation, loop, step)
    results = add_while(builder, bodies, operands, (steps, *start, *sums), None, equation.source)[1:]
    found: list[Atom | None] = [
        results[len(start) + step.summed.index(i)] if i in step.summed else None for i in range(len(consts))
    ]
    found += [results[step.live.index(i)] if i in step.live else None for i in range(len(carry))]
    asked = [atom for atom, flag in zip(found, wanted_inputs, strict=True) if flag]
    used = tuple(atom for atom in asked if atom is not None)
    places = iter(range(len(used)))
    residuals = (*(Residual("input", i) for i in range(len(operands))), Residual("extra", 0))
    gradients = tuple(None if atom is None else next(places) for atom in asked)
    return Split(_counting(equation, loop), dce(builder.build(used)), residuals, gradients)


def _split_step(equation: Equation, loop: While, wanted_inputs: Mask, wanted_outputs: Mask) -> _Step:
    body = equation.bodies[1]
    consts, _ = loop.parts(wanted_inputs)
    asked = (*consts, *active_carry(loop, body, wanted_inputs))

    def places_of(live: Mask) -> tuple[int | None, ...]:
        places = iter(split_vjp(body, asked, live).gradients)
        return tuple(next(places) if flag else None for flag in asked)

    live = carry_fixpoint(
        lambda mask: tuple(place is not None for place in loop.parts(places_of(mask))[1]), wanted_outputs
    )
    consts_places, carry_places = loop.parts(places_of(live))
    summed = tuple(i for i, place in enumerate(consts_places) if place is not None)
    return _Step(
        split_vjp(body, asked, live),
        summed,
        tuple(i for i, flag in enumerate(live) if flag),
        consts_places,
        carry_places,
    )


def _counting(equation: Equation, loop: While) -> Trace:
    """The loop, and the number of its steps."""
    builder = TraceBuilder("while_forward")
    operands = [builder.input(var.type) for var in equation.operands]
    consts, carry = loop.parts(operands)
    bodies = _counting_bodies(equation, loop, limited=False)
    count, *results = add_while(builder, bodies, consts, (full(builder, COUNT, 0), *carry), None, equation.source)
    return builder.build((*results, count))


def _counting_bodies(equation: Equation, loop: While, limited: bool) -> tuple[Trace, Trace]:
    """Condition and body with a counter before the carry; limited, the last const is the number of steps."""
    consts, carry = loop.parts(tuple(var.type for var in equation.operands))
    traces: list[Trace] = []
    for body in equation.bodies:
        builder = TraceBuilder(body.name)
        own_consts = [builder.input(type) for type in consts]
        limit = [builder.input(COUNT)] if limited else []
        count = builder.input(COUNT)
        operands = (*own_consts, *(builder.input(type) for type in carry))
        if body is equation.bodies[1]:
            (next_count,) = builder.add(ops.leaf(aten.add.Scalar), (count, Literal(1)), (COUNT,))
            traces.append(builder.build((next_count, *inline_into(builder, body, operands))))
        elif limited:
            traces.append(builder.build(builder.add(ops.leaf(aten.lt.Tensor), (count, limit[0]), (BOOL,))))
        else:
            traces.append(builder.build(inline_into(builder, body, operands)))
    return traces[0], traces[1]


def _backward_bodies(equation: Equation, loop: While, step: _Step) -> tuple[Trace, Trace]:
    """From the last step to the first: replay up to the step, then one step of the body backwards.

    Consts are the operands of the loop; carries are the number of steps left, cotangents, and sums for the consts.
    """
    types = tuple(var.type for var in equation.operands)
    consts, carry = loop.parts(types)
    carried = (COUNT, *(carry[i] for i in step.live), *(consts[i] for i in step.summed))
    condition = TraceBuilder("steps_left")
    inputs = [condition.input(type) for type in (*types, *carried)]
    (more,) = condition.add(ops.leaf(aten.gt.Scalar), (inputs[len(types)], Literal(0)), (BOOL,))
    builder = TraceBuilder("step_back")
    operands = [builder.input(type) for type in types]
    left = builder.input(COUNT)
    cotangents = [builder.input(carry[i]) for i in step.live]
    sums = [builder.input(consts[i]) for i in step.summed]
    own_consts, first = loop.parts(operands)
    (index,) = builder.add(ops.leaf(aten.sub.Scalar), (left, Literal(1)), (COUNT,))
    replay = _counting_bodies(equation, loop, limited=True)
    counter = full(builder, COUNT, 0)
    before = add_while(builder, replay, (*own_consts, index), (counter, *first), None, equation.source)[1:]
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
