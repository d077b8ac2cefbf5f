"""while_loop: a loop that runs while a condition on its carry holds.

    carry... = while_loop(consts..., carry...)    bodies: cond: consts, carry -> bool
                                                          body: consts, carry -> carry

The signature is torch's with `max_steps` added.

vmap with a condition for each example runs until all are done. An example that is done keeps its
carry. The body runs for it on its last carry before the end. If it never ran, it runs on the first
carry of an example that did. So the body runs on values of real steps only, and no NaN of a step
that is not taken reaches a gradient.

In reverse mode, a loop with `max_steps` is a scan of that length whose steps do nothing once the
condition has failed. Its split is the scan's, and takes time and memory of `max_steps` steps.

Without it nobody knows how long a stack of residuals would be, and the type of a tensor has its
sizes. So the forward counts its steps, and the backward asks `carry_at` for the carry before each
step. That is a buffer which grows where the loop runs, filled by one more forward. Random numbers
are never drawn again, so such a loop may draw none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVarTuple, overload

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current, pytree
from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.errors import CaptureError, MissingRule, TraceTypeError, VmapError, is_int, spelled
from thunder_fn.interpreters.check_errors import CHECK_ERRORS, Checked, first_code
from thunder_fn.interpreters.grad import add, forward_backward, full, zeros
from thunder_fn.interpreters.simplify import dce, dce_to
from thunder_fn.interpreters.vmap import batch, batched_outputs, batched_types, expand_missing
from thunder_fn.ir import ops
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.pairs import COUNTS
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    INVARIANT,
    VJP,
    VMAP,
    Mask,
    Residual,
    Split,
    chosen,
    numbered,
    union,
)
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    every_equation,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.carry_at import add_carry_at, histories
from thunder_fn.structured.cond import COND, where
from thunder_fn.structured.loop_functions import (
    check_carry,
    consts_first,
    result_types,
    with_moving_numbers,
)
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import (
    Bodies,
    agreed,
    capture_bodies,
    check_functions,
    check_takes,
    decided,
    described,
    misuse,
    next_carry,
    operand_tuple,
    own_memory,
    predicate,
    reduced,
    standing_for,
    tensor_type,
    types_of_tensors,
)
from thunder_fn.structured.shared.fixpoint import active_carry, carry_fixpoint
from thunder_fn.structured.shared.running import body_function
from thunder_fn.structured.shared.scan_parts import Loop, add_scan
from thunder_fn.structured.shared.while_parts import BOOL, COUNT, WHILE, While, add_while

Xs = TypeVarTuple("Xs")


aten = torch.ops.aten


# ---- check ----


@CHECK.rule("while_loop")
def while_check_rule(equation: Equation) -> None:
    """Check that both bodies take consts and carry, and that one gives a bool, the other the
    carry's types.
    """
    condition, body = equation.bodies
    for trace in equation.bodies:
        check_operands(equation, equation.operands, trace)
    if condition.output_types != (BOOL,) and [
        getattr(t, "dtype", None) for t in condition.output_types
    ] != [torch.bool]:
        what = (
            f"while_loop: the condition gives {', '.join(map(str, condition.output_types))}, not"
            " one bool"
        )
        raise TraceTypeError(what, source=equation.source)
    check_types(equation, body.output_types, "the body gives")
    _, carry = While.of(equation).parts(equation.operands)
    check_types(equation, tuple(var.type for var in carry), "the carry is")


# ---- evaluate ----


@EVALUATE.rule("while_loop")
def while_evaluate_rule(
    bodies: Sequence[Trace], *args: Any, num_consts: int, max_steps: int | None = None
) -> tuple[Any, ...]:
    """Run the body while the condition holds; inside a capture, record the loop."""
    condition, body = bodies
    recorder = current()
    if recorder is not None:
        literals = {"num_consts": num_consts, "max_steps": max_steps}
        return bind(recorder, WHILE, args, (condition, body), body.output_types, **literals)
    consts, carry, steps = args[:num_consts], args[num_consts:], 0
    holds, run = body_function(condition), body_function(body)
    if max_steps is None and internals.is_make_fx():
        return tuple(internals.while_loop_operator(holds, run, consts, carry))
    with histories():
        while (max_steps is None or steps < max_steps) and holds(*consts, *carry)[0]:
            carry, steps = run(*consts, *carry), steps + 1
    return tuple(carry)


@INVARIANT.rule("while_loop")
def while_constants_rule(equation: Equation) -> Mask:
    """The first operands."""
    return tuple(i < While.of(equation).num_consts for i in range(len(equation.operands)))


# ---- split ----


@VJP.rule("while_loop")
def while_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Split a bounded loop as a scan, an unbounded one with a growing buffer."""
    max_steps = While.of(equation).max_steps
    if max_steps is None:
        return _split_unbounded(equation, wanted_inputs, wanted_outputs)
    return forward_backward(as_scan(equation, max_steps), wanted_inputs, wanted_outputs)


# ---- split: bounded ----


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


# ---- split: unbounded ----


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


# ---- vmap ----


@VMAP.rule("while_loop")
def while_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """One condition for all examples stays one; a condition for each runs until all are done."""
    loop, (condition, body) = While.of(equation), equation.bodies
    consts, given = loop.parts(batched)
    carry = carry_fixpoint(lambda mask: batch(body, (*consts, *mask), size, randomness)[1], given)
    own, (is_batched,) = batch(condition, (*consts, *carry), size, randomness)
    if is_batched and any(map(ops.calls_back, equation.bodies)):
        what = (
            "vmap: a while_loop whose condition differs between examples runs its steps for all,"
            " and these print or call back"
        )
        fix = "Use `tfn.map`, which runs a loop for each example, or print after the loop."
        raise VmapError(what, source=equation.source, fix=fix)
    if is_batched:
        carry = (True,) * len(carry)
    builder = TraceBuilder("vmap_while")
    types = batched_types(equation.operand_types, batched, size)
    own_consts, own_carry = loop.parts(builder.take(types))
    start = expand_missing(builder, own_carry, given, carry, size)
    if is_batched:
        results = _add_masked(
            builder, equation, own_consts, start, (consts, carry), size, randomness
        )
    else:
        new = batched_outputs(*batch(body, (*consts, *carry), size, randomness), carry, size)
        results = add_while(builder, (own, new), own_consts, start, loop.max_steps, equation.source)
    return builder.build(results), carry


def _add_masked(
    builder: TraceBuilder,
    equation: Equation,
    consts: tuple[Atom, ...],
    start: tuple[Atom, ...],
    flags: tuple[Mask, Mask],
    size: Dim,
    randomness: str,
) -> tuple[Atom, ...]:
    """A loop that also carries which examples run, and on what the body runs for each."""
    condition, body = equation.bodies
    alive, _ = batch(condition, (*flags[0], *flags[1]), size, randomness)
    new = batched_outputs(*batch(body, (*flags[0], *flags[1]), size, randomness), flags[1], size)
    (first,) = inline_into(builder, alive, (*consts, *start))
    assert isinstance(first, Var), "a condition for each example is a variable"
    own = tuple(
        _of_some_alive(builder, first, value) if flag else value
        for value, flag in zip(consts, flags[0], strict=True)
    )
    carry = (first, *start, *(_of_some_alive(builder, first, value) for value in start))
    bodies, steps = _masked_bodies(alive, new, len(consts)), While.of(equation).max_steps
    return add_while(builder, bodies, own, carry, steps, equation.source)[1 : 1 + len(start)]


def _masked_bodies(alive: Trace, new: Trace, num_consts: int) -> tuple[Trace, Trace]:
    """Condition and body of a loop over all examples. Its carries are a mask of the examples that
    run, their carries, and the values that the body runs on.
    """
    # Before: alive: consts, carry -> mask                new: consts, carry -> carry
    # After:  outer: consts, (mask, carry, safe) -> any   inner: the same -> (mask, carry, safe)
    #         `safe` is the carry where the mask is true and the last good one elsewhere, so that
    #         an example that is done computes nothing new, and no NaN
    const_types, carry_types = new.input_types[:num_consts], new.input_types[num_consts:]
    masks = tensor_type(alive.output_types[0])
    inputs = (*const_types, masks, *carry_types, *carry_types)
    outer = TraceBuilder("any_alive")
    mask = outer.take(inputs)[num_consts]
    some = ops.emit(outer, aten.any.default, (mask,), replace(masks, shape=()))
    inner = TraceBuilder(new.name)
    values = inner.take(inputs)
    consts, mask, both = values[:num_consts], values[num_consts], values[num_consts + 1 :]
    carry, last = both[: len(carry_types)], both[len(carry_types) :]
    used = [where(inner, mask, value, safe) for value, safe in zip(carry, last, strict=True)]
    results = inline_into(inner, new, (*consts, *used))
    kept = [where(inner, mask, value, old) for value, old in zip(results, carry, strict=True)]
    (more,) = inline_into(inner, alive, (*consts, *kept))
    still = ops.emit(inner, aten.logical_and.default, (mask, more), masks)
    return outer.build((some,)), inner.build((still, *kept, *used))


def _of_some_alive(builder: TraceBuilder, alive: Var, value: Atom) -> Atom:
    """The batch, with the first example that is alive in the place of those that are not."""
    assert isinstance(value, Var), "operands are variables"
    size, *shape = tensor_type(value.type).shape
    if size == 0:
        return value
    one = TensorType(torch.int64, (1,), tensor_type(alive.type).device)
    all_of_them, dtype = replace(one, shape=(size,)), torch.int64
    numbers = ops.emit(builder, aten._to_copy.default, (alive,), all_of_them, dtype=dtype)
    index = ops.emit(builder, aten.argmax.default, (numbers, 0, True), one)
    type = replace(tensor_type(value.type), shape=(1, *shape))
    other = ops.emit(builder, aten.index_select.default, (value, 0, index), type)
    return where(builder, alive, value, other)


# ---- check_errors ----


@CHECK_ERRORS.rule("while_loop")
def while_check_errors_rule(
    builder: TraceBuilder,
    equation: Equation,
    operands: tuple[Atom, ...],
    checked: Callable[[Trace], Trace],
) -> Checked:
    """Carry the first code and the number of steps behind the carries.

    The condition is asked twice before a step, and once after the last one unless `max_steps` ended
    the loop. One that draws random numbers or has effects is not checked.
    """
    loop, (condition, body) = While.of(equation), equation.bodies
    holds = None if ops.has_effects(condition) else checked(condition)
    new = checked(body)
    consts, carry = loop.parts(operands)
    code_type = tensor_type(new.output_types[-1])
    types = (*equation.operand_types, code_type, COUNT)
    asks, runs = TraceBuilder(condition.name), TraceBuilder(body.name)
    asked = inline_into(asks, condition, asks.take(types)[:-2])
    *given, code, count = runs.take(types)
    if holds is not None:
        code = first_code(runs, code, inline_into(runs, holds, given)[-1])
    *values, own = inline_into(runs, new, given)
    count = ops.emit(runs, aten.add.Scalar, (count, 1), COUNT)
    bodies = asks.build(asked), runs.build((*values, first_code(runs, code, own), count))
    start = (*carry, zeros(builder, code_type), zeros(builder, COUNT))
    results = add_while(builder, bodies, consts, start, loop.max_steps, equation.source)
    *results, code, count = results
    if holds is not None:
        later = inline_into(builder, holds, (*consts, *results))[-1]
        if loop.max_steps is not None:
            is_asked = ops.emit(builder, aten.lt.Scalar, (count, loop.max_steps), BOOL)
            later = ops.emit(builder, aten.mul.Tensor, (later, is_asked), code_type)
        code = first_code(builder, code, later)
    return results, code


# ---- simplify ----


@DCE.rule("while_loop")
def while_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop carries that neither the condition nor a wanted carry ever reads, and consts that
    nothing reads.
    """
    loop, (condition, body) = While.of(equation), equation.bodies
    small, asks = dce_to(condition, (True,))

    def step(live: Mask) -> Mask:
        return loop.parts(dce_to(body, live)[1])[1]

    first = union((wanted, loop.parts(asks)[1]))
    live = carry_fixpoint(step, first)
    new, reads = dce_to(body, live)
    consts = union((loop.parts(asks)[0], loop.parts(reads)[0]))
    return reduced(equation, (small, new), (*consts, *live), live, num_consts=sum(consts))


# ---- for users ----


@overload
def while_loop(
    cond_fn: Callable[[*Xs], Any],
    body_fn: Callable[[*Xs], tuple[*Xs]],
    carried_inputs: tuple[*Xs],
    *,
    max_steps: int | None = None,
) -> tuple[*Xs]: ...
@overload
def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Any,
    *,
    max_steps: int | None = None,
) -> Any: ...
@spelled(
    "Put what is carried into a tuple: `while_loop(cond_fn, body_fn, (x, y))`.",
    cond_fun="cond_fn",
    body_fun="body_fn",
    init_val="carried_inputs",
    max_trip_count="max_steps",
)
@internals.with_twin(internals.dynamo_while_loop)
def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Any,
    *,
    max_steps: int | None = None,
) -> Any:
    """Run `while cond_fn(*carry): carry = body_fn(*carry)`, for at most `max_steps` steps.

    Law: equals the Python loop, under every transform; under vmap each example takes its own number
        of steps.

    Args:
        cond_fn: takes the carries, returns a bool or a tensor of one bool.
        body_fn: takes the carries, returns a tuple of the next ones, or the only one. Each keeps
            its structure and types.
        carried_inputs: a tuple or a list of pytrees. A number in it that a step changes is a
            scalar tensor from there on in a trace.
        max_steps: the loop ends after so many steps in any case. Reverse mode then takes time and
            memory of that many. Without it, it keeps the carries of the steps taken, in a buffer
            that grows, and runs the loop once more.

    Raises:
        TraceTypeError: a carry changes its structure or types, or the condition is no bool.

    Example:
        >>> first = (torch.tensor(0), torch.tensor(1))
        >>> while_loop(lambda n, x: x < 100, lambda n, x: (n + 1, x * 3), first)
        (tensor(5), tensor(243))

    Source: torch.while_loop for the signature, jax.lax.while_loop for the semantics.
    """
    if max_steps is not None and not is_int(max_steps, 0):
        raise TraceTypeError(
            f"while_loop: max_steps is None or an int that is not negative, given {max_steps!r}"
        )
    check_functions("while_loop", cond_fn=cond_fn, body_fn=body_fn)
    carry, is_bare = operand_tuple("while_loop", "carried_inputs", carried_inputs), False
    what = f"the carries one by one, {len(carry)} of them"
    check_takes("while_loop", what, len(carry), cond_fn, body_fn)
    if current() is None and max_steps is None and internals.is_kept_for_later():
        return internals.pytorchs("while_loop", cond_fn, body_fn, carry)

    @standing_for(cond_fn)
    def condition(*values: Any) -> Any:
        return predicate("while_loop", cond_fn(*values), "condition", cond_fn)

    @standing_for(body_fn)
    def body(*values: Any) -> tuple[Any, ...]:
        nonlocal is_bare
        new = body_fn(*values)
        is_bare = len(carry) == 1 and not isinstance(new, (tuple, list))
        if not is_bare and not isinstance(new, (tuple, list)):
            what = f"the body must return a tuple of the {len(carry)} carries, not {described(new)}"
            raise misuse("while_loop", what, function=body_fn)
        return next_carry(values, (new,) if is_bare else tuple(new))

    result = (_run if current() is None else _record)(condition, body, carry, max_steps)
    return result[0] if is_bare else result


def _run(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    carry: tuple[Any, ...],
    max_steps: int | None,
) -> Any:
    first, steps = carry, 0
    while (max_steps is None or steps < max_steps) and decided(
        "while_loop", condition(*carry), bool
    ):
        carry, steps = body(*carry), steps + 1
        if steps == 1:
            check_carry("while_loop", body, first, carry)
    if (
        steps == 0 and len(carry) == 1
    ):  # only the body tells whether its one carry stands in a tuple
        with suppress(CaptureError):
            return own_memory(_record(condition, body, carry, max_steps))
    return own_memory(carry)


def _record(
    cond_fn: Callable[..., Any],
    body: Callable[..., Any],
    carry: tuple[Any, ...],
    max_steps: int | None,
) -> Any:
    @standing_for(cond_fn)
    def condition(*values: Any) -> torch.Tensor:
        found = cond_fn(*values)
        return found if isinstance(found, torch.Tensor) else torch.full((), found, dtype=torch.bool)

    def captured_with(carry: tuple[Any, ...]) -> tuple[Bodies, Any]:
        bodies = capture_bodies("while_loop", (condition, body), [carry, carry])
        bodies = agreed(bodies, types_of_tensors(carry), bodies.bodies[1].output_types)
        return bodies, result_types(bodies.captured[1])

    carry, bodies = with_moving_numbers(carry, captured_with)
    captured = bodies.captured[1]
    check_carry("while_loop", body, carry, result_types(captured))
    num_consts = len(bodies.closures)
    traces = tuple(consts_first(trace, num_consts) for trace in bodies.bodies)
    values = (*bodies.closures, *pytree.tensors_in(carry))
    return captured.result(
        while_evaluate_rule(traces, *values, num_consts=num_consts, max_steps=max_steps)
    )


divert("while_loop", while_loop)


@wiring("while_loop")
def while_wiring(equation: Equation) -> Wiring:
    """Wire a carry from each step to the next, to the condition, which is control, and to the
    result without a step.
    """
    first, carries = While.of(equation).num_consts, range(len(equation.outputs))
    return Wiring(
        (
            *body_ports(equation, 1),
            *((("operand", i), ("in", 0, i)) for i in range(len(equation.operands))),
            *((("out", 1, i), ("in", body, first + i)) for i in carries for body in (0, 1)),
            *((("operand", first + i), ("result", i)) for i in carries),
        ),
        (("out", 0, 0),),
    )


@COUNTS.rule("while_loop")
def while_counts_rule(equation: Equation, sizes: Sequence[int]) -> dict[str, int]:
    """Count the atoms of the consts."""
    return {"num_consts": sum(While.of(equation).parts(sizes)[0])}
