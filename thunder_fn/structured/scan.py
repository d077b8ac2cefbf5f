"""scan: a loop of known length whose steps hand on a carry, read a slice of xs and give a slice of
ys.

    carry..., ys... = scan(consts..., carry..., xs...)    body: consts, carry, x -> carry, y

Inside, xs and ys are stacked along dim 0. The signature is torch's, the semantics are in JAX.

Every rule asks the same question first, which carries are active, batched or used, and answers it
with `carry_fixpoint`. The functions for users are in `loop_functions.py`.

Reverse mode is a loop that leaves residuals, and a loop in the other direction on cotangents. The
backward's carries are the cotangents of the carry and one sum for each const. The place of each
residual of the body decides how much memory the loop takes:

- a const, or what depends on consts only, is not stacked: it is passed again, or computed once in
  front of the loop;
- an x, and a y, are there already;
- the rest, each once, is stacked as further ys.

Source: JAX's `_scan_linearize` for the placement, `_scan_transpose` for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from thunder_fn.capture import current
from thunder_fn.errors import InvalidTrace, TraceTypeError
from thunder_fn.interpreters.check_errors import CHECK_ERRORS, Checked, carrying_code
from thunder_fn.interpreters.checkpoint.recomputed import found_again
from thunder_fn.interpreters.grad import add, forward_backward, zeros
from thunder_fn.interpreters.simplify import cse, cut_to, dce, dce_to
from thunder_fn.interpreters.vmap import (
    batch,
    batched_outputs,
    batched_types,
    expand_missing,
    move_dim,
)
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.pairs import COUNTS
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    INVARIANT,
    LOWER,
    SLICED,
    VJP,
    VMAP,
    Mask,
    Residual,
    Split,
    chosen,
    divided,
    numbered,
)
from thunder_fn.ir.trace import Atom, Dim, Equation, Trace, TraceBuilder, Type, Var, as_dim, cut
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.roll import in_blocks
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import invariant_atoms, reduced, tensor_type
from thunder_fn.structured.shared.fixpoint import active_carry, carry_fixpoint
from thunder_fn.structured.shared.running import body_function
from thunder_fn.structured.shared.scan_parts import SCAN, Loop, Parts, add_scan, slice_of, stacked

# ---- check ----


@CHECK.rule("scan")
def scan_check_rule(equation: Equation) -> None:
    """Check that the body takes consts, carry and slices of xs, and gives the carry's types and
    slices of ys.
    """
    loop = Loop.of(equation)
    numbers = (loop.num_consts, loop.num_carry, loop.length)
    if any(isinstance(number, int) and number < 0 for number in numbers):
        raise InvalidTrace(
            f"scan: its numbers are not negative, given {loop}", source=equation.source
        )
    consts, carry, xs = loop.parts(equation.operands)
    for var in xs:
        if tensor_type(var.type).shape[:1] != (loop.length,):
            what = f"scan: {var} is {var.type}, but the loop has {loop.length} steps"
            raise TraceTypeError(what, source=equation.source)
    slices = (Var(var.index, slice_of(var.type)) for var in xs)
    check_operands(equation, (*consts, *carry, *slices), equation.body)
    own_carry, ys = loop.results(equation.body.output_types)
    check_types(
        equation, (*own_carry, *(stacked(type, loop.length) for type in ys)), "the body gives"
    )
    check_types(
        equation,
        (*(var.type for var in carry), *equation.output_types[loop.num_carry :]),
        "the carry is",
    )


# ---- evaluate ----


@EVALUATE.rule("scan")
def scan_evaluate_rule(
    bodies: Sequence[Trace],
    *args: Any,
    num_consts: int,
    num_carry: int,
    length: Any,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, ...]:
    """Run the body step by step; inside a capture, record the loop."""
    loop, (body,) = Loop(num_consts, num_carry, as_dim(length), reverse, unroll), bodies
    recorder = current()
    own_carry, own_ys = loop.results(body.output_types)
    if recorder is not None:
        types = (*own_carry, *(stacked(type, loop.length) for type in own_ys))
        return bind(recorder, SCAN, args, (body,), types, **loop.literals())
    consts, carry, xs = loop.parts(args)
    slices, run = [x.unbind(0) for x in xs], body_function(body)
    columns: list[list[Any]] = [[] for _ in own_ys]
    for step in reversed(range(length)) if reverse else range(length):
        outputs = run(*consts, *carry, *[slice[step] for slice in slices])
        carry, ys = loop.results(outputs)
        for column, y in zip(columns, ys, strict=True):
            column.append(y)
    return (
        *carry,
        *(_stack(column, type, reverse) for column, type in zip(columns, own_ys, strict=True)),
    )


def _stack(column: list[Any], type: Type, reverse: bool) -> Any:
    if column:
        return torch.stack(column[::-1] if reverse else column)
    empty = stacked(type, 0)
    return torch.empty(cast("tuple[int, ...]", empty.shape), dtype=empty.dtype, device=empty.device)


@INVARIANT.rule("scan")
def scan_constants_rule(equation: Equation) -> Mask:
    """The first operands."""
    return tuple(i < Loop.of(equation).num_consts for i in range(len(equation.operands)))


@SLICED.rule("scan")
def scan_slices_rule(equation: Equation) -> Mask:
    """The last operands."""
    loop = Loop.of(equation)
    return tuple(i >= loop.num_consts + loop.num_carry for i in range(len(equation.operands)))


# ---- split ----


@VJP.rule("scan")
def scan_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """A scan that leaves residuals, and a scan in the other direction on cotangents."""
    loop = Loop.of(equation)
    wanted_consts, _, wanted_xs = loop.parts(wanted_inputs)
    active = active_carry(equation.body, *loop.parts(wanted_inputs))
    asked = (*wanted_consts, *active, *wanted_xs)
    wanted_carry, wanted_ys = loop.results(wanted_outputs)

    def step(live: Mask) -> Mask:
        places = forward_backward(equation.body, asked, (*live, *wanted_ys)).places(asked)
        return tuple(place is not None for place in loop.parts(places)[1])

    live = carry_fixpoint(step, wanted_carry)
    split = found_again(forward_backward(equation.body, asked, (*live, *wanted_ys)), "scan")
    placed = _place_residuals(loop, split, len(equation.outputs))
    return Split(
        _forward(equation, loop, placed),
        *_backward(
            equation,
            loop,
            split,
            placed,
            _Question(asked, wanted_inputs, wanted_carry, live, wanted_ys),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Question:
    """The question of a split: the body's wanted inputs, the loop's, and the outputs with
    cotangents.
    """

    asked: Mask
    wanted_inputs: Mask
    wanted_carry: Mask
    live: Mask
    wanted_ys: Mask


@dataclass(frozen=True, slots=True)
class _Placed:
    """The places where the backward body finds its residuals.

    `body` gives the outputs of the loop's body and then the residuals that are stacked. `hoisted`
    maps the operands to those that are computed once. `places` says for each residual of the body
    which residual of the loop it is.
    """

    body: Trace
    hoisted: Trace
    places: tuple[Residual, ...]


def _place_residuals(loop: Loop, split: Split, num_outputs: int) -> _Placed:
    forward = cse(split.forward)
    extra = forward.outputs[len(forward.outputs) - split.num_extra :]
    sources = {"input": forward.inputs, "output": forward.outputs, "extra": extra}
    inputs = {var.index: position for position, var in enumerate(forward.inputs)}
    ys = {
        atom: position
        for position, atom in enumerate(forward.outputs[:num_outputs])
        if position >= loop.num_carry
    }
    fixed = invariant_atoms(
        forward, tuple(position < loop.num_consts for position in range(len(forward.inputs)))
    )
    stacks: dict[Atom, int] = {}
    once: dict[Atom, int] = {}
    found: list[Residual | int] = []  # an int is the place of one that is hoisted
    for residual in split.residuals:
        atom = sources[residual.kind][residual.index]
        position = inputs.get(atom.index) if isinstance(atom, Var) else None
        if (
            position is not None
            and not loop.num_consts <= position < loop.num_consts + loop.num_carry
        ):
            found.append(Residual("input", position))
        elif not isinstance(atom, Var) or fixed[atom.index]:
            found.append(once.setdefault(atom, len(once)))
        elif atom in ys:
            found.append(Residual("output", ys[atom]))
        else:
            found.append(Residual("extra", stacks.setdefault(atom, len(stacks))))
    places = (Residual("extra", len(stacks) + it) if isinstance(it, int) else it for it in found)
    body = dce(cut(forward, outputs=(*forward.outputs[:num_outputs], *stacks)))
    return _Placed(body, cut_to(forward, tuple(once)), tuple(places))


def _forward(equation: Equation, loop: Loop, placed: _Placed) -> Trace:
    """The loop with stacked residuals, then the residuals that need no loop."""
    # Before: the body gives (carry, ys, stacked residuals), one slice of each stack a step
    # After:  consts, carry, xs -> carry, ys, stacks, hoisted residuals
    builder = TraceBuilder("scan_forward")
    operands = builder.take(equation.operand_types)
    results = add_scan(builder, loop, placed.body, loop.parts(operands), equation.source)
    once = inline_into(builder, placed.hoisted, operands, equation.source)
    return builder.build((*results, *once))


def _backward(
    equation: Equation, loop: Loop, split: Split, placed: _Placed, question: _Question
) -> tuple[Trace, tuple[Residual, ...], tuple[int | None, ...]]:
    """The scan on cotangents: its trace, its residuals, and where the gradients are."""
    # Before: the backward of one step: its residuals, live carry cts, wanted y cts -> gradients
    # After:  residuals, wanted carry cts, wanted y cts -> gradients of the wanted inputs, by a scan
    #         in the other direction:
    #             consts: residuals that are the same in each step
    #             carry:  a ct for each live carry, a sum for each const that has a gradient
    #             xs:     stacked residuals, cts of the wanted ys
    #             ys:     gradients of the xs
    residuals = tuple(dict.fromkeys(placed.places))
    num_stacked = len(placed.body.outputs) - len(equation.outputs)
    is_const = tuple(_is_const(place, loop, num_stacked) for place in residuals)
    gradients = loop.parts(split.places(question.asked))
    summed = [i for i, place in enumerate(gradients[0]) if place is not None]
    builder = TraceBuilder("scan_backward")
    given = builder.take(_residual_type(place, equation, placed) for place in residuals)
    carry, ys = loop.results(equation.outputs)
    carry_cts: list[Atom] = [
        builder.input(var.type) if flag else zeros(builder, tensor_type(var.type))
        for var, flag, live in zip(carry, question.wanted_carry, question.live, strict=True)
        if live
    ]
    ys_cts = builder.take(var.type for var in chosen(ys, question.wanted_ys))
    sums = [zeros(builder, tensor_type(equation.operands[i].type)) for i in summed]
    body = _backward_body(
        equation, loop, split, placed, question, residuals, is_const, gradients, summed
    )
    consts, xs = divided(given, is_const)
    parts, back = (consts, (*carry_cts, *sums), (*xs, *ys_cts)), not loop.reverse
    results = add_scan(builder, replace(loop, reverse=back), body, parts, equation.source)
    live = [i for i, flag in enumerate(question.live) if flag]
    wanted_carry = loop.parts(question.wanted_inputs)[1]
    stacks = iter(range(len(carry_cts) + len(sums), len(results)))
    # where each input's gradient is among the results: (carry cts, sums, gradients of xs)
    found: list[int | None] = [
        len(carry_cts) + summed.index(i) if i in summed else None for i in range(loop.num_consts)
    ]
    found += [live.index(i) if flag and i in live else None for i, flag in enumerate(wanted_carry)]
    found += [None if place is None else next(stacks) for place in gradients[2]]
    asked = chosen(found, question.wanted_inputs)
    trace = builder.build(tuple(results[place] for place in _some(asked)))
    return dce(trace), residuals, numbered(place is not None for place in asked)


def _is_const(place: Residual, loop: Loop, num_stacked: int) -> bool:
    return (place.kind == "input" and place.index < loop.num_consts) or (
        place.kind == "extra" and place.index >= num_stacked
    )


def _residual_type(place: Residual, equation: Equation, placed: _Placed) -> Type:
    match place.kind:
        case "input":
            return equation.operands[place.index].type
        case "output":
            return equation.outputs[place.index].type
        case "extra":
            count = len(equation.outputs)
            stacks = [
                stacked(type, Loop.of(equation).length) for type in placed.body.output_types[count:]
            ]
            return (*stacks, *placed.hoisted.output_types)[place.index]


def _backward_body(  # noqa: PLR0913 - a part of the answer each
    equation: Equation,
    loop: Loop,
    split: Split,
    placed: _Placed,
    question: _Question,
    residuals: tuple[Residual, ...],
    is_const: Mask,
    gradients: Parts[int | None],
    summed: list[int],
) -> Trace:
    """One step back: residuals and cotangents to cotangents of the carry, sums for the consts,
    gradients of the xs.
    """
    # Before: residuals in the order of one step, live carry cts, y cts -> gradients
    # After:  const residuals, (live carry cts, sums), (slices of stacked residuals, y cts)
    #         -> (live carry cts, sums), gradients of the xs
    builder = TraceBuilder(split.backward.name)
    values: dict[Residual, Atom] = {}
    for place, const in zip(residuals, is_const, strict=True):
        if const:
            values[place] = builder.input(_residual_type(place, equation, placed))
    carry, ys = loop.results(equation.outputs)
    carry_cts = builder.take(var.type for var in chosen(carry, question.live))
    sums = builder.take(equation.operands[i].type for i in summed)
    for place, const in zip(residuals, is_const, strict=True):
        if not const:
            values[place] = builder.input(slice_of(_residual_type(place, equation, placed)))
    ys_cts = builder.take(slice_of(var.type) for var in chosen(ys, question.wanted_ys))
    arguments = (*(values[place] for place in placed.places), *carry_cts, *ys_cts)
    found = inline_into(builder, split.backward, arguments)
    new_cts = [
        zeros(builder, tensor_type(var.type)) if place is None else found[place]
        for var, place, flag in zip(carry, gradients[1], question.live, strict=True)
        if flag
    ]
    new_sums = [
        add(builder, total, found[place])
        for total, place in zip(sums, _some(gradients[0]), strict=True)
    ]
    return builder.build((*new_cts, *new_sums, *(found[place] for place in _some(gradients[2]))))


def _some(places: Sequence[int | None]) -> list[int]:
    return [place for place in places if place is not None]


# ---- vmap ----


@VMAP.rule("scan")
def scan_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """A scan of the batched body. A carry that becomes batched on the way starts expanded."""
    # Before: xs and ys are stacked along dim 0, which is also the batch dim of batched operands
    # After:  the loop is dim 0 and the batch dim 1 of batched xs and ys, so that a slice has the
    #         batch dim first, as the batched body takes it
    loop, body = Loop.of(equation), equation.body
    consts, given, xs = loop.parts(batched)
    carry = carry_fixpoint(
        lambda mask: batch(body, (*consts, *mask, *xs), size, randomness)[1][: loop.num_carry],
        given,
    )
    new, flags = batch(body, (*consts, *carry, *xs), size, randomness)
    builder = TraceBuilder("vmap_scan")
    types = equation.operand_types
    operands = builder.take(batched_types(types, batched, size))
    own_consts, own_carry, own_xs = loop.parts(operands)
    parts = (
        own_consts,
        expand_missing(builder, own_carry, given, carry, size),
        tuple(
            move_dim(builder, var, 0, 1) if flag else var
            for var, flag in zip(own_xs, xs, strict=True)
        ),
    )
    results = add_scan(
        builder, loop, batched_outputs(new, flags, carry, size), parts, equation.source
    )
    final, ys = loop.results(results)
    ys_flags = flags[loop.num_carry :]
    moved = tuple(
        move_dim(builder, y, 1, 0) if flag else y for y, flag in zip(ys, ys_flags, strict=True)
    )
    return builder.build((*final, *moved)), (*carry, *ys_flags)


# ---- check_errors ----


@CHECK_ERRORS.rule("scan")
def scan_check_errors_rule(
    builder: TraceBuilder,
    equation: Equation,
    operands: tuple[Atom, ...],
    checked: Callable[[Trace], Trace],
) -> Checked:
    """Carry the first code behind the carries."""
    loop = Loop.of(equation)
    consts, carry, xs = loop.parts(operands)
    body, count = checked(equation.body), loop.num_carry
    start = zeros(builder, tensor_type(body.output_types[-1]))
    new = carrying_code(body, loop.num_consts + count, count)
    results = add_scan(builder, loop, new, (consts, (*carry, start), xs), equation.source)
    return (*results[:count], *results[count + 1 :]), results[count]


# ---- simplify ----


@DCE.rule("scan")
def scan_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop ys, xs and consts that are not needed, and carries that no needed thing ever reads."""
    # A wanted result needs its carry; a step needs the carries that it reads for what is live:
    # `live` is the least set that is closed under both.
    loop = Loop.of(equation)
    wanted_carry, wanted_ys = loop.results(wanted)

    def step(live: Mask) -> Mask:
        return loop.parts(dce_to(equation.body, (*live, *wanted_ys))[1])[1]

    live = carry_fixpoint(step, wanted_carry)
    body, reads = dce_to(equation.body, (*live, *wanted_ys))
    consts, _, xs = loop.parts(reads)
    kept = (*consts, *live, *xs)
    counts = {"num_consts": sum(consts), "num_carry": sum(live)}
    return reduced(equation, (body,), kept, (*live, *wanted_ys), **counts)


# ---- lower ----


@LOWER.rule("scan")
def scan_lower_rule(equation: Equation) -> Trace | None:
    """Lower a scan with `unroll` to a shorter scan of so many steps at once."""
    loop = Loop.of(equation)
    return in_blocks(equation) if loop.unroll > 1 and loop.length else None


@wiring("scan")
def scan_wiring(equation: Equation) -> Wiring:
    """Wire a carry from each step to the next, and to the result where there are no steps."""
    loop = Loop.of(equation)
    first, carries = loop.num_consts, range(loop.num_carry)
    return Wiring(
        (
            *body_ports(equation, 0),
            *((("out", 0, i), ("in", 0, first + i)) for i in carries),
            *((("operand", first + i), ("result", i)) for i in carries),
        )
    )


@COUNTS.rule("scan")
def scan_counts_rule(equation: Equation, sizes: Sequence[int]) -> dict[str, int]:
    """Count the atoms of the consts and of the carry."""
    consts, carry, _ = Loop.of(equation).parts(sizes)
    return {"num_consts": sum(consts), "num_carry": sum(carry)}
