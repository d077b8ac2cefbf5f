"""Reverse mode of cond and switch, and what their rules share.

Each branch is split. A branch's residuals go into slots that branches share by type, and slots that
a branch does not own hold zeros. The backward makes the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thunder_fn.interpreters.checkpoint.recomputed import found_again
from thunder_fn.interpreters.grad import forward_backward, zeros
from thunder_fn.ir.constraints import names_of, renamed
from thunder_fn.ir.rules import Mask, Residual, Split, chosen, numbered, union
from thunder_fn.ir.symbols import symbols_of
from thunder_fn.ir.trace import Atom, Equation, TensorType, Trace, TraceBuilder, Type
from thunder_fn.ir.walking import inline_into, resized
from thunder_fn.structured.choice_types import names_in, types_of_choice


def zeros_of(builder: TraceBuilder, type: Type) -> Atom:
    """Zeros of a type, which is a tensor's: a derivative that one branch lacks."""
    assert isinstance(type, TensorType), "only tensors have zeros"
    return zeros(builder, type)


def one_choice(equation: Equation, bodies: tuple[Trace, ...], input_types: Sequence[Type]) -> Trace:
    """A trace of one choice between bodies, from the choice and the operands."""
    builder = TraceBuilder(equation.op.name)
    operands = builder.take(input_types)
    types = types_of_choice(bodies, names_in(equation, bodies))
    return builder.build(
        builder.add(
            equation.op,
            operands,
            types,
            kwargs=equation.kwargs,
            bodies=bodies,
            source=equation.source,
        )
    )


def cond_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Split every branch; the backward makes the same choice."""
    # Before: equation: choice, operands -> outputs
    # After:  forward:  choice, operands -> outputs, slots
    #         backward: choice, operands and outputs that a branch reads again, slots, cotangents
    #                   -> gradients of the operands for which any branch has one
    # In the masks the choice is the first input: it has no gradient, and operands begin at 1.
    splits = [
        _split_branch(equation, body, wanted_inputs[1:], wanted_outputs) for body in equation.bodies
    ]
    count = len(equation.outputs)
    slots, owned = _share_slots([split.forward.output_types[count:] for split in splits])
    forward_bodies = tuple(
        _fill_slots(split.forward, count, slots, own)
        for split, own in zip(splits, owned, strict=True)
    )
    forward = one_choice(equation, forward_bodies, equation.operand_types)
    inputs, outputs = _forwarded(splits)
    residuals = (
        Residual("input", 0),
        *(Residual("input", index + 1) for index in inputs),
        *(Residual("output", index) for index in outputs),
        *(Residual("extra", index) for index in range(len(slots))),
    )
    gradients = union([tuple(place is not None for place in split.gradients) for split in splits])
    operand_types = equation.operand_types[1:]
    wanted_types = list(chosen(operand_types, wanted_inputs[1:]))
    given = [
        *(operand_types[index] for index in inputs),
        *(equation.outputs[index].type for index in outputs),
        *slots,
        *(var.type for var in chosen(equation.outputs, wanted_outputs)),
    ]
    bodies = tuple(
        _backward_body(split, given, inputs, outputs, own, gradients, wanted_types)
        for split, own in zip(splits, owned, strict=True)
    )
    backward = one_choice(equation, bodies, [equation.operands[0].type, *given])
    skipped = (None,) * int(wanted_inputs[0])
    return Split(forward, backward, residuals, (*skipped, *numbered(gradients)))


def _split_branch(
    equation: Equation, body: Trace, wanted_inputs: Mask, wanted_outputs: Mask
) -> Split:
    """The split of a branch, its backward on values of the equation's types, whose sizes have
    names of their own.
    """
    split = forward_backward(body, wanted_inputs, wanted_outputs)
    results, count = equation.output_types, len(split.residuals)
    wanted = chosen(results, wanted_outputs)
    found = names_of(split.backward.input_types[count:], wanted)
    outside = symbols_of(body)
    rename = renamed(
        {size: name for size, name in found.items() if size.is_Symbol and size not in outside}
    )
    backward = rename(split.backward)
    backward = _on_types(backward, [*backward.input_types[:count], *wanted])
    split = found_again(
        replace(split, forward=rename(split.forward), backward=backward), equation.op.name
    )
    held = zip(split.residuals, split.backward.input_types, strict=False)
    given = [results[place.index] if place.kind == "output" else type for place, type in held]
    return replace(split, backward=_on_types(split.backward, [*given, *wanted]))


def _on_types(trace: Trace, types: Sequence[Type]) -> Trace:
    """The trace on inputs of other types, whose sizes are the same numbers: `f32[u2]` where it
    takes `f32[u0 + 1]`.
    """
    if trace.input_types == tuple(types):
        return trace
    builder = TraceBuilder(trace.name)
    inputs = builder.take(types)
    given = (
        value if value.type == type else resized(builder, value, type, "cond")
        for value, type in zip(inputs, trace.input_types, strict=True)
    )
    return builder.build(inline_into(builder, trace, tuple(given)))


def _share_slots(types: Sequence[Sequence[Type]]) -> tuple[list[Type], list[list[int]]]:
    """Slots for the branches' residuals, shared by type: [x], [x], [x, x] need two. Also each
    branch's own slots.
    """
    slots: list[Type] = []
    owned: list[list[int]] = []
    for branch in types:
        free = list(range(len(slots)))
        mine: list[int] = []
        for type in branch:
            slot = next((index for index in free if slots[index] == type), None)
            if slot is None:
                slot = len(slots)
                slots.append(type)
            else:
                free.remove(slot)
            mine.append(slot)
        owned.append(mine)
    return slots, owned


def _fill_slots(forward: Trace, count: int, slots: list[Type], own: list[int]) -> Trace:
    """A branch's forward with a residual in each of its own slots, and zeros in the others."""
    # Before: operands -> outputs, own residuals
    # After:  operands -> outputs, slots
    builder = TraceBuilder(forward.name)
    results = inline_into(builder, forward, builder.take(forward.input_types))
    mine = dict(zip(own, results[count:], strict=True))
    filled = tuple(
        mine[index] if index in mine else zeros_of(builder, type)
        for index, type in enumerate(slots)
    )
    return builder.build((*results[:count], *filled))


def _forwarded(splits: Sequence[Split]) -> tuple[list[int], list[int]]:
    """The operands and outputs that some branch's backward reads again."""
    inputs = sorted({r.index for split in splits for r in split.residuals if r.kind == "input"})
    outputs = sorted({r.index for split in splits for r in split.residuals if r.kind == "output"})
    return inputs, outputs


def _backward_body(
    split: Split,
    given: list[Type],
    inputs: list[int],
    outputs: list[int],
    own: list[int],
    gradients: Mask,
    wanted_types: list[Type],
) -> Trace:
    """A branch's backward on the operands that all branches' backwards share."""
    # Before: own residuals, cotangents -> own gradients
    # After:  inputs, outputs, slots, cotangents -> gradients that any branch has
    builder = TraceBuilder(split.backward.name)
    arguments = builder.take(given)
    first_slot = len(inputs) + len(outputs)
    num_cotangents = len(split.backward.inputs) - len(split.residuals)
    values: list[Atom] = []
    for residual in split.residuals:
        match residual.kind:
            case "input":
                values.append(arguments[inputs.index(residual.index)])
            case "output":
                values.append(arguments[len(inputs) + outputs.index(residual.index)])
            case "extra":
                values.append(arguments[first_slot + own[residual.index]])
    cotangents = arguments[len(arguments) - num_cotangents :]
    found = inline_into(builder, split.backward, (*values, *cotangents))
    results: list[Atom] = []
    for place, wanted, type in zip(split.gradients, gradients, wanted_types, strict=True):
        if wanted:
            results.append(zeros_of(builder, type) if place is None else found[place])
    return builder.build(tuple(results))
