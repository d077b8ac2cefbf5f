"""cond and switch: one of several bodies runs, chosen by a scalar.

    outputs = cond(pred, *operands)      bodies: true, false      on the operands
    outputs = switch(index, *operands)   bodies: one per branch   on the operands

Semantics: JAX; the signature of `cond` is torch.cond's. Results share no memory with operands. Both
are one op with a chosen branch: cond's number is 0 for true and 1 for false.

Reverse mode splits each branch. A branch's residuals go into slots that branches share by type, and
slots that a branch does not own hold zeros. The backward makes the same choice.

vmap with a batched choice runs every branch and selects. A branch reads zeros for the examples that
do not take it, so that no NaN of theirs reaches a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal as Choice, TypeVar, TypeVarTuple, overload

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current, pytree
from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.derived.leaf_vmap import raise_size
from thunder_fn.errors import TraceTypeError, spelled
from thunder_fn.interpreters.checkpoint.recomputed import found_again
from thunder_fn.interpreters.grad import forward_backward, zeros
from thunder_fn.interpreters.simplify import dce, dce_to
from thunder_fn.interpreters.vmap import (
    batch,
    batched_outputs,
    batched_types,
    expand,
    expand_missing,
)
from thunder_fn.ir import ops
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.constraints import names_of, renamed
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    FREE_TYPES,
    INVARIANT,
    VJP,
    VMAP,
    Mask,
    Residual,
    Split,
    chosen,
    divided,
    numbered,
    union,
)
from thunder_fn.ir.symbols import made_by, symbols_of
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
)
from thunder_fn.ir.walking import begun_with, inline_into, resized
from thunder_fn.structured.choice_types import (
    check_branches,
    check_names,
    names_in,
    new_names,
    types_of_choice,
)
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import (
    agreed,
    capture_bodies,
    check_functions,
    check_takes,
    decided,
    described,
    index as chosen_index,
    is_kept_open,
    misuse,
    operand_tuple,
    own_memory,
    predicate,
    reduced,
    widened,
)
from thunder_fn.structured.shared.running import body_function
from thunder_fn.structured.shared.scan_parts import Loop, add_scan

R = TypeVar("R")
Xs = TypeVarTuple("Xs")
Batched = Choice["select", "loop"]


aten = torch.ops.aten
COND = Op("structured", "cond")
SWITCH = Op("structured", "switch")
LOOP = (("batched", Literal("loop")),)
"""The literal of a choice that vmap with a choice for each example turns into a loop."""


# ---- check ----


@CHECK.rule("cond", "switch")
def cond_check_rule(equation: Equation) -> None:
    """Check for a scalar choice, bodies on the operands, and equal output types."""
    choice, *operands = equation.operands
    if not isinstance(choice.type, TensorType) or choice.type.shape != ():
        raise TraceTypeError(
            f"{equation.op}: the choice must be a scalar tensor, not {choice.type}",
            source=equation.source,
        )
    for body in equation.bodies:
        check_operands(equation, tuple(operands), body)
        check_types(equation, body.output_types, f"{body.name} gives")
    check_names(equation)


# ---- evaluate ----


@EVALUATE.rule("cond")
def cond_evaluate_rule(
    bodies: Sequence[Trace], pred: Any, *operands: Any, **options: Any
) -> tuple[Any, ...]:
    """Run the chosen body; inside a capture, record the choice."""
    recorder = current()
    if recorder is not None and isinstance(pred, torch.Tensor):
        return _bind(recorder, COND, (pred, *operands), tuple(bodies), options)
    if is_kept_open(pred):
        true_fn, false_fn = (_with_own_results(body_function(body)) for body in bodies)
        return tuple(internals.cond_operator(pred, true_fn, false_fn, operands))
    return body_function(bodies[0] if pred else bodies[1])(*operands)


def _with_own_results(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, without results that are operands."""
    return lambda *xs: own_memory(run(*xs))


@EVALUATE.rule("switch")
def switch_evaluate_rule(
    bodies: Sequence[Trace], index: Any, *operands: Any, **options: Any
) -> tuple[Any, ...]:
    """Run the chosen body, the index clamped; inside a capture, record the choice."""
    recorder = current()
    if recorder is not None and isinstance(index, torch.Tensor):
        return _bind(recorder, SWITCH, (index, *operands), tuple(bodies), options)
    return body_function(bodies[min(max(int(index), 0), len(bodies) - 1)])(*operands)


def _bind(
    recorder: Any, op: Op, values: Sequence[Any], bodies: tuple[Trace, ...], options: dict[str, Any]
) -> Any:
    return bind(
        recorder, op, values, bodies, types_of_choice(bodies, new_names(recorder)), **options
    )


@INVARIANT.rule("cond", "switch")
def cond_constants_rule(equation: Equation) -> Mask:
    """Mark every operand but the predicate: branches take them as they are."""
    return (False, *(True for _ in equation.operands[1:]))


# ---- split ----


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


@VJP.rule("cond", "switch")
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
    builder, results = begun_with(forward)
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


# ---- vmap ----


@VMAP.rule("cond", "switch")
def cond_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """One choice for all examples stays a choice; a choice for each example becomes a select.

    It is a loop if asked, or if a branch prints or raises: an example runs no branch but its own.
    """
    if batched[0] and made_by(equation):
        raise_size(equation)
    if batched[0]:
        needs_loop = equation.kwargs == LOOP or any(
            ops.calls_back(body) or ops.refuses_values(body) for body in equation.bodies
        )
        by = _loop if needs_loop else _select
        return by(equation, batched, size, randomness)
    done = [batch(body, batched[1:], size, randomness) for body in equation.bodies]
    flags = union([mask for _, mask in done])
    bodies = tuple(batched_outputs(trace, mask, flags, size) for trace, mask in done)
    types = batched_types(equation.operand_types, batched, size)
    return one_choice(equation, bodies, types), flags


def _select(equation: Equation, batched: Mask, size: Dim, randomness: str) -> tuple[Trace, Mask]:
    """Run every branch on safe operands and select each example's outputs."""
    builder = TraceBuilder(f"select_{equation.op.name}")
    types = equation.operand_types
    choice, *operands = builder.take(batched_types(types, batched, size))
    taken = _taken(builder, equation, choice, size)
    columns: list[list[Atom]] = []
    for body, mask in zip(equation.bodies, taken, strict=True):
        safe = tuple(
            (
                where(builder, mask, operand if flag else expand(builder, operand, size), None)
                if isinstance(operand.type, TensorType) and is_differentiable(operand.type)
                else (operand if flag else expand(builder, operand, size))
            )
            for operand, flag in zip(operands, batched[1:], strict=True)
        )
        new, flags = batch(body, (True,) * len(safe), size, randomness)
        results = inline_into(builder, new, safe, equation.source)
        everywhere = (True,) * len(flags)
        columns.append(list(expand_missing(builder, results, flags, everywhere, size)))
    outputs = list(columns[-1])
    for mask, column in zip(taken[-2::-1], columns[-2::-1], strict=True):
        outputs = [
            where(builder, mask, value, other) for value, other in zip(column, outputs, strict=True)
        ]
    passed = [_passed_through(equation, index) for index in range(len(outputs))]
    kept = tuple(
        value if i is None else operands[i] for value, i in zip(outputs, passed, strict=True)
    )
    return dce(builder.build(kept)), tuple(i is None or batched[i + 1] for i in passed)


def _passed_through(equation: Equation, index: int) -> int | None:
    """Return the position of the operand that every branch gives back as this output; None where
    they differ.
    """
    found = {
        body.inputs.index(atom) if atom in body.inputs else None
        for body in equation.bodies
        for atom in (body.outputs[index],)
    }
    return found.pop() if len(found) == 1 else None


def _loop(equation: Equation, batched: Mask, size: Dim, randomness: str) -> tuple[Trace, Mask]:
    """A scan over the examples, each of which runs the one branch that it takes."""
    for body in equation.bodies:
        # refuses random numbers where they are not allowed
        batch(body, batched[1:], size, randomness)
        if randomness == "same" and ops.has_side_effect(equation):
            return _select(equation, batched, size, randomness)
    # Before: choice, operands -> outputs
    # After:  a scan without carry: unbatched operands, slices of the batched ones -> outputs
    builder, step = TraceBuilder(f"loop_{equation.op.name}"), TraceBuilder(equation.op.name)
    types = equation.operand_types
    order = sorted(range(len(types)), key=lambda i: batched[i])
    inner = {i: step.input(types[i]) for i in order}
    results = step.add(
        equation.op,
        tuple(inner[i] for i in range(len(types))),
        equation.output_types,
        kwargs=equation.kwargs,
        bodies=equation.bodies,
        source=equation.source,
    )
    operands = builder.take(batched_types(types, batched, size))
    xs, consts = divided(operands, batched)
    found = add_scan(
        builder, Loop(0, 0, size), step.build(results), (consts, (), xs), equation.source
    )
    return builder.build(found), (True,) * len(equation.outputs)


def _taken(builder: TraceBuilder, equation: Equation, choice: Var, size: Dim) -> list[Var]:
    """Tell for each branch which examples take it."""
    mask = TensorType(
        torch.bool,
        (size,),
        choice.type.device if isinstance(choice.type, TensorType) else torch.device("cpu"),
    )
    if equation.op == COND:
        true = ops.emit(builder, aten.ne.Scalar, (choice, 0), mask)
        return [true, ops.emit(builder, aten.logical_not.default, (true,), mask)]
    last = len(equation.bodies) - 1
    clamped = ops.emit(builder, aten.clamp.default, (choice, 0, last), choice.type)
    return [ops.emit(builder, aten.eq.Scalar, (clamped, i), mask) for i in range(last + 1)]


def where(builder: TraceBuilder, mask: Var, value: Atom, other: Atom | None) -> Var:
    """value where the mask is true, else other, or zeros."""
    assert (
        isinstance(value, Var)
        and isinstance(value.type, TensorType)
        and isinstance(mask.type, TensorType)
    )
    shape = (*mask.type.shape, *(1 for _ in value.type.shape[1:]))
    wide = TensorType(torch.bool, shape, mask.type.device)
    reshaped = ops.emit(builder, aten.reshape.default, (mask, shape), wide)
    if other is None:
        other = zeros(builder, TensorType(value.type.dtype, (), value.type.device))
    return ops.emit(builder, aten.where.self, (reshaped, value, other), value.type)


# ---- simplify ----


@DCE.rule("cond", "switch")
def cond_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop outputs and operands that no branch needs."""
    done = [dce_to(body, wanted) for body in equation.bodies]
    reads = union([mask for _, mask in done])
    return reduced(equation, [trace for trace, _ in done], (True, *reads), wanted)


FREE_TYPES.enter(True, "cond", "switch")


# ---- for users ----


@overload
def cond(
    pred: Any,
    true_fn: Callable[[*Xs], R],
    false_fn: Callable[[*Xs], R],
    operands: tuple[*Xs] = ...,
    *,
    batched: Batched = "select",
) -> R: ...
@overload
def cond(
    pred: Any,
    true_fn: Callable[..., R],
    false_fn: Callable[..., R],
    operands: list[Any],
    *,
    batched: Batched = "select",
) -> R: ...
@spelled(
    "Put the operands into a tuple: `cond(pred, true_fn, false_fn, (x, y))`.",
    true_fun="true_fn",
    false_fun="false_fn",
    operand="operands",
    linear="Leave it out.",
)
@internals.with_twin(internals.dynamo_cond)
def cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Any = (),
    *,
    batched: str = "select",
) -> Any:
    """Run `true_fn(*operands)` where pred is true, `false_fn(*operands)` where it is not.

    Law: ``cond(True, f, g, xs) == f(*xs)``; under vmap with a batched pred it is a select, without
        NaN gradients from the branch that is not taken.

    Args:
        pred: a bool, symbolic or not, or a tensor of one bool.
        true_fn, false_fn: functions of the operands that return the same pytree of tensors of equal
            types, sizes that a branch finds in data aside. They may close over tensors, return
            their inputs and call anything traceable.
        operands: a tuple or a list of pytrees.
        batched: the way in which vmap takes a pred for each example. "select" runs both branches on
            the batch and selects. "loop" goes from example to example and runs the one branch that
            each takes.

    Raises:
        TraceTypeError: the branches' results differ; lists every leaf that does. Or pred is no
            bool, or operands no tuple.
        CaptureError: a branch writes to a tensor from outside.

    Example:
        >>> x = torch.tensor(-2.0)
        >>> cond(x > 0, lambda x: x, lambda x: -x, (x,))
        tensor(2.)

    Source: torch.cond for the signature, jax.lax.cond for the semantics.
    """
    recorder, options = current(), _options("cond", batched)
    check_functions("cond", true_fn=true_fn, false_fn=false_fn)
    operands = operand_tuple("cond", "operands", operands)
    pred = predicate("cond", pred, "predicate")
    check_takes("cond", f"its {len(operands)} operands", len(operands), true_fn, false_fn)
    if is_kept_open(pred):
        return internals.pytorchs("cond", pred, true_fn, false_fn, operands)
    if recorder is None or not isinstance(pred, torch.Tensor):
        return own_memory((true_fn if decided("cond", pred, bool) else false_fn)(*operands))
    return _choose(recorder, COND, pred, (true_fn, false_fn), operands, options)


@overload
def switch(
    index: Any,
    branches: Sequence[Callable[[*Xs], R]],
    operands: tuple[*Xs] = ...,
    *,
    batched: Batched = "select",
) -> R: ...
@overload
def switch(
    index: Any,
    branches: Sequence[Callable[..., R]],
    operands: list[Any],
    *,
    batched: Batched = "select",
) -> R: ...
@overload
def switch(
    index: Any, branches: torch.nn.ModuleList, operands: Any = (), *, batched: Batched = "select"
) -> Any: ...
@spelled(
    "Put the operands into a tuple: `switch(index, branches, (x, y))`.",
    operand="operands",
    linear="Leave it out.",
)
@internals.with_twin()
def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]] | torch.nn.ModuleList,
    operands: Any = (),
    *,
    batched: str = "select",
) -> Any:
    """Run `branches[index](*operands)`, with the index clamped into range.

    Law: ``switch(i, fs, xs) == fs[min(max(i, 0), len(fs) - 1)](*xs)``. Otherwise as `cond`.

    Raises:
        TraceTypeError: there is no branch, the index is no int, or the branches' results differ.

    Example:
        >>> switch(torch.tensor(1), [torch.sin, torch.neg, torch.exp], (torch.tensor(2.0),))
        tensor(-2.)

    Source: jax.lax.switch.
    """
    recorder, options = current(), _options("switch", batched)
    if not isinstance(branches, (Sequence, torch.nn.ModuleList)) or isinstance(branches, str):
        raise misuse(
            "switch", f"branches must be a tuple or a list of functions, not {described(branches)}"
        )
    functions = tuple(branches)
    if not functions:
        raise misuse("switch", "needs at least one branch")
    check_functions("switch", **{f"branches[{i}]": branch for i, branch in enumerate(functions)})
    operands = operand_tuple("switch", "operands", operands)
    choice = chosen_index("switch", index, "index")
    check_takes("switch", f"its {len(operands)} operands", len(operands), *functions)
    if is_kept_open(choice):
        if not isinstance(choice, torch.Tensor):
            choice = torch.scalar_tensor(choice, dtype=torch.int64)
        return _choices_of_two(functions, choice, operands)
    if recorder is None or not isinstance(choice, torch.Tensor):
        return own_memory(
            functions[min(max(decided("switch", choice, int), 0), len(functions) - 1)](*operands)
        )
    return _choose(recorder, SWITCH, choice, functions, operands, options)


def _choices_of_two(
    functions: tuple[Callable[..., Any], ...], index: torch.Tensor, operands: tuple[Any, ...]
) -> Any:
    """A `switch` as PyTorch's `cond` between its first half and its second."""
    if len(functions) == 1:
        return functions[0](*operands)
    half = len(functions) // 2
    first = lambda index, *xs: _choices_of_two(functions[:half], index, xs)
    second = lambda index, *xs: _choices_of_two(functions[half:], index - half, xs)
    return torch.cond(index < half, first, second, (index, *operands))


def _options(name: str, batched: str) -> dict[str, Any]:
    if batched not in ("select", "loop"):
        raise TraceTypeError(f"{name}: batched is 'select' or 'loop', given {batched!r}")
    return {} if batched == "select" else {"batched": batched}


def _choose(
    recorder: Any,
    op: Op,
    choice: torch.Tensor,
    functions: tuple[Callable[..., Any], ...],
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    bodies = widened(capture_bodies(op.name, functions, [operands] * len(functions)))
    for other in bodies.bodies[1:]:
        bodies = agreed(bodies, bodies.bodies[0].output_types, other.output_types)
    check_branches(op, functions, bodies)
    values = (choice, *pytree.tensors_in(operands), *bodies.closures)
    results = _bind(recorder, op, values, bodies.bodies, options)
    return bodies.captured[0].result(results)


def _torch_cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    """Choose by `torch.cond`, which asks any tensor of one element whether it is true."""
    if isinstance(pred, torch.Tensor) and pred.dtype != torch.bool and pred.numel() == 1:
        pred = pred != 0
    return cond(pred, true_fn, false_fn, operands)


divert("cond", _torch_cond)


@wiring("cond", "switch")
def cond_wiring(equation: Equation) -> Wiring:
    """Wire every branch to the operands behind the choice, which is control."""
    bodies = range(len(equation.bodies))
    return Wiring(
        tuple(pair for body in bodies for pair in body_ports(equation, body, 1)), (("operand", 0),)
    )
