"""The split of scan: a loop that leaves residuals, and a loop in the other direction on cotangents.

The place of each residual of the body decides how much memory the loop takes:

- a const, or what depends on consts only, is not stacked: it is passed again, or computed once in
  front of the loop;
- an x, and a y, are there already;
- the rest, each once, is stacked as further ys.

The backward's carries are the cotangents of the carry and one sum for each const.

Source: JAX's `_scan_linearize` for the placement, `_scan_transpose` for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thunder_fn.interpreters.checkpoint.recomputed import found_again
from thunder_fn.interpreters.grad import add, forward_backward, zeros
from thunder_fn.interpreters.simplify import cse, cut_to, dce
from thunder_fn.ir.rules import Mask, Residual, Split, chosen, divided, numbered
from thunder_fn.ir.trace import Atom, Equation, Trace, TraceBuilder, Type, Var, cut
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.shared.bodies import invariant_atoms, tensor_type
from thunder_fn.structured.shared.fixpoint import active_carry, carry_fixpoint
from thunder_fn.structured.shared.scan_parts import Loop, Parts, add_scan, slice_of, stacked


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
