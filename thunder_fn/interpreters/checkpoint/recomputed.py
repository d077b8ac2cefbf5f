"""Halves of a split whose backward computes some residuals again, from kept values: a checkpoint's,
and a loop's.

The policy of a checkpoint says what is computed again. A loop stacks the residuals of its steps,
and a choice keeps them in slots that its branches share. So neither has a place for values of
another size in each step, or for numbers: `found_again`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import sympy
import torch

from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.checkpoint.cost import FLOPS_PER_BYTE, bytes_of, cost_of
from thunder_fn.interpreters.checkpoint.policies import Answer
from thunder_fn.interpreters.checkpoint.remat import (
    Recomputation,
    cheapest_cut,
    numbers_read,
    recompute,
    variables,
)
from thunder_fn.interpreters.simplify import dce, inline
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound, made_at
from thunder_fn.ir.rules import Residual, Split
from thunder_fn.ir.symbols import finders
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    cut,
    symbols_of_type,
)
from thunder_fn.ir.walking import inline_into

COPY_TO = ops.leaf(torch.ops.aten._to_copy.default)
CPU = torch.device("cpu")

Kept: TypeAlias = "Sequence[tuple[Var, Answer]]"
"""The kept values, and their places."""


def places_of(
    plan: Recomputation, kept: Kept, flat: Trace, count: int
) -> tuple[Kept, tuple[Residual, ...]]:
    """List the values kept beside the forward's first `count` outputs, and the places where the
    backward finds what it reads.
    """
    outputs = {
        atom.index: i
        for i, atom in reversed(list(enumerate(flat.outputs[:count])))
        if isinstance(atom, Var)
    }
    stored: Kept = [(var, how) for var, how in kept if var.index not in outputs or how == "offload"]
    order = {var.index: i for i, var in enumerate(flat.inputs)}
    extras = {var.index: i for i, (var, _) in enumerate(stored)}
    inputs = (Residual("input", order[var.index]) for var in plan.inputs)
    held = (
        (
            Residual("extra", extras[var.index])
            if var.index in extras
            else Residual("output", outputs[var.index])
        )
        for var, _ in kept
    )
    return stored, (*inputs, *held)


def forward_keeping(flat: Trace, count: int, stored: Kept) -> Trace:
    """The body, and then the kept values, in the chosen memory."""
    builder = TraceBuilder(flat.name)
    trace = cut(flat, outputs=(*flat.outputs[:count], *(var for var, _ in stored)), name="program")
    inputs = builder.take(flat.input_types)
    results = inline_into(builder, dce(trace), inputs)
    extras, before = list[Atom](), len(builder.equations)
    for value, (_, how) in zip(results[count:], stored, strict=True):
        assert isinstance(value, Var), "what is kept is a variable"
        extras.append(_moved(builder, value, CPU) if how == "offload" else value)
    return _moved_when_made(builder.build((*results[:count], *extras)), before)


def _moved_when_made(trace: Trace, before: int) -> Trace:
    """The trace whose equations from `before` on come each after the one that makes what they read,
    so that the device's memory is free while the others run.
    """
    made, moved = made_at(trace.equations), trace.equations[before:]
    by_place: dict[int, list[Equation]] = {}
    for equation in moved:
        by_place.setdefault(made.get(equation.operands[0].index, -1), []).append(equation)
    order = list(by_place.get(-1, ()))
    for place, equation in enumerate(trace.equations[:before]):
        order += [equation, *by_place.get(place, ())]
    return cut(trace, equations=order) if moved else trace


def _made_when_read(trace: Trace, before: int) -> Trace:
    """The trace whose first equations, up to `before`, come each right before its first reader.
    Those with effects, as random numbers, stay in order.
    """
    late = {at for at in range(before) if not ops.has_side_effect(trace.equations[at])}
    made = {var: at for var, at in made_at(trace.equations).items() if at in late}
    order: dict[int, None] = {}

    def put(waiting: list[int]) -> None:
        while waiting:
            operands = trace.equations[waiting[-1]].operands
            needs = {made[var.index] for var in operands if var.index in made} - order.keys()
            waiting += sorted(needs, reverse=True)
            if not needs:
                order.setdefault(waiting.pop())

    for at in range(len(trace.equations)):
        if at not in late:
            put([at])
    shown = (made.get(atom.index) for atom in trace.outputs if isinstance(atom, Var))
    put([at for at in shown if at is not None])
    return cut(trace, equations=(trace.equations[at] for at in order))


def _moved(builder: TraceBuilder, value: Var, device: torch.device) -> Var:
    """Copy a value to another device. Between a GPU and pinned memory of the CPU the copy is
    asynchronous: both ways go through the GPU's queue, in order.
    """
    assert isinstance(value.type, TensorType), "only tensors are kept elsewhere"
    type = TensorType(value.type.dtype, value.type.shape, device)
    options: dict[str, Any] = {"device": device}
    if "cuda" in (device.type, value.type.device.type):
        options["non_blocking"] = True
    kwargs = tuple((name, Literal(option)) for name, option in options.items())
    return builder.add(COPY_TO, (value,), (type,), kwargs=kwargs)[0]


def backward_computing(
    split: Split, flat: Trace, needed: Sequence[Atom], plan: Recomputation, kept: Kept
) -> Trace:
    """Make the backward from inputs, kept values and cotangents: compute the other residuals
    again, and pull back.
    """
    builder = TraceBuilder(split.backward.name)
    builder.require(flat.constraints)
    env: dict[int, Atom] = {var.index: builder.input(var.type) for var in plan.inputs}
    for var, how in kept:
        env[var.index] = builder.input(_stored_type(var.type) if how == "offload" else var.type)
    given = split.backward.inputs[len(split.residuals) :]
    cotangents = builder.take(var.type for var in given)
    for constant in flat.constants:
        env[constant.var.index] = builder.constant(
            constant.tensor, constant.var.type, owned=constant.owned
        )
    for var, how in kept:
        stored = env[var.index]
        if how == "offload" and isinstance(stored, Var) and isinstance(var.type, TensorType):
            env[var.index] = _moved(builder, stored, var.type.device)
    for equation in plan.equations:
        results = builder.copy(equation, lambda var: env[var.index])
        env.update(
            (var.index, value)
            for var, value in zip(equation.outputs, results, strict=True)
            if var.index not in env
        )
    values = tuple(env[atom.index] if isinstance(atom, Var) else atom for atom in needed)
    before = len(builder.equations)
    trace = builder.build(inline_into(builder, split.backward, (*values, *cotangents)))
    is_late = any(how == "offload" for _, how in kept)
    return dce(_made_when_read(trace, before) if is_late else trace)


def _stored_type(type: Type) -> Type:
    return TensorType(type.dtype, type.shape, CPU) if isinstance(type, TensorType) else type


# ---- what a loop or a choice cannot keep ----


def found_again(split: Split, op: str) -> Split:
    """The split whose backward finds the unbacked sizes of its forward again, and computes the
    values of these sizes.

    Law: forward and backward compute the same as those of the split. Every residual is a tensor
        whose size is known beforehand.

    Raises:
        MissingRule: random numbers are among what would be computed again.
    """
    flat = inline(split.forward)
    found = finders(flat)
    if not found:
        return split
    residuals = split.residual_values(flat.inputs, flat.outputs)
    needed = (*residuals, *numbers_read(split.backward, found))
    loose = {var.index for var in _results(flat) if _is_loose(var.type, found)}
    if not any(var.index in loose for var in variables(needed)):
        return split
    own = {var.index for var in variables(residuals)} - loose - {var.index for var in flat.inputs}
    _refuse_drawing_again(
        recompute(flat, needed, own | {var.index for var in _results(flat)} - loose), op
    )
    price: Callable[[Var], float] = lambda var: (
        math.inf if var.index in loose else FLOPS_PER_BYTE * bytes_of(var.type)
    )
    plan = recompute(flat, needed, own | cheapest_cut(flat, needed, own, cost_of, price))
    held: Kept = [(var, "save") for var in plan.kept]
    count = len(flat.outputs) - split.num_extra
    stored, places = places_of(plan, held, flat, count)
    backward = backward_computing(split, flat, residuals, plan, held)
    return Split(forward_keeping(flat, count, stored), backward, places, split.gradients)


def _results(trace: Trace) -> list[Var]:
    return list(bound(trace.equations))


def _is_loose(type: Type, found: Collection[sympy.Basic]) -> bool:
    """Test for a value that is no tensor, or one of an unbacked size."""
    return not isinstance(type, TensorType) or any(
        symbol in found for symbol in symbols_of_type(type)
    )


def _refuse_drawing_again(least: Recomputation, op: str) -> None:
    """Raise where random numbers would be drawn again, however much is kept."""
    equation = next(filter(ops.has_side_effect, least.equations), None)
    if equation is not None:
        what = (
            f"{op}: its backward reads {equation.op}, as many random numbers as a size found in"
            " data says"
        )
        fix = "Draw as many as there may be and take some, or draw them outside."
        raise MissingRule(what, source=equation.source, fix=fix)
