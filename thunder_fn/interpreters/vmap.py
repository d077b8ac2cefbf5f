"""Batching: a trace on examples becomes a trace on batches.

Leaf rules are derived from functorch's (`derived/leaf_vmap.py`); a composite's is its body's, once
for each distinct body and question. Inside, a batched value has its batch dim first; values that do
not depend on the batch stay unbatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from thunder_fn.derived.leaf_jvp import own_statistics
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.derived.leaf_vmap import batched_types as batched_types, vmap_rule
from thunder_fn.derived.quirks.statistics import STATISTICS
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import VMAP, Mask
from thunder_fn.ir.trace import Atom, Dim, Equation, TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import begun_with, inline_into, put, walk

MOVEDIM = ops.leaf(torch.ops.aten.movedim.int)
ROWS: dict[str, str] = {"torch.nn.functional.linear": "input"}
"""Calls that work on the rows of their first argument, whatever dims it has. A batch of that
alone is the same call on more rows. The names of these calls, and of the argument.
"""


@memo(16384)
def batch(trace: Trace, batched: Mask, size: Dim, randomness: str = "error") -> tuple[Trace, Mask]:
    """Batch a trace whose batched inputs have a leading batch dim; also which outputs are
    batched.
    """
    builder = TraceBuilder(f"vmap_{trace.name}")
    inputs = builder.take(batched_types(trace.input_types, batched, size))
    arguments = list(zip(inputs, batched, strict=True))
    step = partial(_batch_equation, builder, size=size, randomness=randomness)
    results = walk(builder, trace, arguments, step, lift=lambda atom: (atom, False))
    return builder.build(tuple(atom for atom, _ in results)), tuple(flag for _, flag in results)


def _batch_equation(
    builder: TraceBuilder,
    equation: Equation,
    operands: tuple[tuple[Atom, bool], ...],
    size: Dim,
    randomness: str,
) -> list[tuple[Atom, bool]]:
    arguments, batched = tuple(atom for atom, _ in operands), tuple(flag for _, flag in operands)
    if not any(batched) and not (ops.has_random(equation) and randomness != "same"):
        return [(value, False) for value in put(builder, equation, arguments)]
    new, flags = rule_of(equation, batched, size, randomness)
    if is_on_rows(equation, batched):
        results: tuple[Atom, ...] = put(
            builder, equation, arguments, bodies=(new,), types=new.output_types
        )
    elif equation.op.kind == "composite":
        op = ops.composite(f"vmap_{ops.short_name(equation.op).removeprefix('vmap_')}")
        results = builder.add(
            op, arguments, new.output_types, bodies=(new,), source=equation.source
        )
    else:
        results = inline_into(builder, new, arguments, equation.source)
    are_tensors = (isinstance(var.type, TensorType) for var in equation.outputs)
    return [
        (value, flag and is_tensor)
        for value, flag, is_tensor in zip(results, flags, are_tensors, strict=True)
    ]


def is_on_rows(equation: Equation, batched: Mask) -> bool:
    """Test whether the equation is one of `ROWS`, and nothing but the rows is batched."""
    first = (
        equation.args[0]
        if equation.args
        else dict(equation.kwargs).get(ROWS.get(equation.op.name, ""))
    )
    return equation.op.name in ROWS and batched == tuple(var == first for var in equation.operands)


def rule_of(equation: Equation, batched: Mask, size: Dim, randomness: str) -> tuple[Trace, Mask]:
    """The batched equation and which of its outputs are batched."""
    if equation.op.kind == "composite":
        return batch(equation.body, batched, size, randomness)
    if equation.op.kind == "structured":
        return VMAP.of(equation)(equation, batched, size, randomness)
    single = alone(equation)
    rule = vmap_rule(single, batched, size, randomness)
    own = own_statistics(single) if equation.op.name in STATISTICS else None
    if isinstance(rule, Trace):  # parts that read saved statistics do not say what these are of
        return batch(rule if own is None else own, batched, size, randomness)
    trace = (
        rule.trace
        if own is None
        else _differentiated_as(rule.trace, batch(own, batched, size, randomness), size)
    )
    return trace, (True,) * len(equation.outputs)


def _differentiated_as(computed: Trace, other: tuple[Trace, Mask], size: Dim) -> Trace:
    """A batch that is computed by functorch's rule, which reads saved statistics, and
    differentiated by another.
    """
    # Before: both traces: batched operands -> outputs, some of which are no variables
    # After:  one equation with both as bodies, on the outputs that are variables, all batched
    trace, own = other
    builder = TraceBuilder(computed.name)
    inputs = builder.take(computed.input_types)
    places = [place for place, atom in enumerate(computed.outputs) if isinstance(atom, Var)]
    flags = tuple(own[place] for place in places)
    cut = [
        replace(body, outputs=tuple(body.outputs[place] for place in places))
        for body in (computed, trace)
    ]
    bodies = (cut[0], batched_outputs(cut[1], flags, (True,) * len(flags), size))
    found = iter(builder.add(ops.DIFFERENTIATED_AS, inputs, cut[0].output_types, bodies=bodies))
    return builder.build(
        tuple(next(found) if isinstance(atom, Var) else atom for atom in computed.outputs)
    )


def expand(builder: TraceBuilder, value: Atom, size: Dim) -> Var:
    """The value repeated along a new leading batch dim."""
    assert isinstance(value, Var) and isinstance(value.type, TensorType), "only tensors are batched"
    type = TensorType(value.type.dtype, (size, *value.type.shape), value.type.device)
    return ops.emit(builder, ops.aten.expand.default, (value, type.shape), type)


def expand_missing(
    builder: TraceBuilder, values: Sequence[Atom], own: Mask, wanted: Mask, size: Dim
) -> tuple[Atom, ...]:
    """The values, expanded where a batch dim is wanted that they do not have of their own."""
    return tuple(
        expand(builder, value, size) if flag and not have else value
        for value, have, flag in zip(values, own, wanted, strict=True)
    )


def batched_outputs(trace: Trace, own: Mask, flags: Mask, size: Dim) -> Trace:
    """The first outputs get a batch dim where the flags say so; the others stay as they are."""
    builder, results = begun_with(trace)
    return builder.build(expand_missing(builder, results, own, (*flags, *own[len(flags) :]), size))


def move_dim(builder: TraceBuilder, value: Atom, source: int, destination: int) -> Atom:
    """The value with one dim moved."""
    if source == destination:
        return value
    assert isinstance(value, Var) and isinstance(value.type, TensorType), "only tensors are batched"
    shape = list(value.type.shape)
    shape.insert(destination, shape.pop(source))
    type = TensorType(value.type.dtype, tuple(shape), value.type.device)
    return ops.emit(builder, MOVEDIM, (value, source, destination), type)


@memo(1024)
def vmap(
    trace: Trace, in_dims: tuple[int | None, ...], size: Dim, randomness: str = "error"
) -> tuple[Trace, tuple[int | None, ...]]:
    """Batch a trace over a new axis.

    Law: ``evaluate(vmap(t, d, n)[0], xs)[k]`` at index i of its batch dim is ``evaluate(t, take(xs,
        d, i))[k]``, for every ``i < n``.

    Args:
        trace: closed and checked.
        in_dims: one per input, not negative; None leaves that input unbatched.
        size: length n of the new axis.
        randomness: "error", "different" or "same": what random ops do.

    Returns:
        The batched trace, and the batch dim of each output, None where it does not depend on the
            batch. Input i of shape s becomes s with n inserted at in_dims[i].

    Raises:
        MissingRule: an op has no batching rule; names it and the user's line.
        VmapError: a random op under randomness="error".

    Source: autodidax part 1; functorch batching rules by `leaf_vmap`.
    """
    inner, flags = batch(trace, tuple(dim is not None for dim in in_dims), size, randomness)
    builder = TraceBuilder(inner.name)
    arguments: list[Atom] = []
    for var, dim in zip(trace.inputs, in_dims, strict=True):
        if dim is None or not isinstance(var.type, TensorType):
            arguments.append(builder.input(var.type))
            continue
        shape = (*var.type.shape[:dim], size, *var.type.shape[dim:])
        value = builder.input(TensorType(var.type.dtype, shape, var.type.device))
        arguments.append(move_dim(builder, value, dim, 0))
    outputs = inline_into(builder, inner, tuple(arguments))
    return dce(builder.build(outputs)), tuple(0 if flag else None for flag in flags)
