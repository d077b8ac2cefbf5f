"""Batching: a trace on examples becomes a trace on batches.

Leaf rules are derived from functorch's (`derive_vmap.py`); a composite's is its body's, once for each distinct body
and question. Inside, a batched value has its batch dim first; what does not depend on the batch stays unbatched.
"""

from __future__ import annotations

import torch

from thunder_fn import ops
from thunder_fn.derive import alone
from thunder_fn.derive_vmap import VmapRule, batched_type, vmap_rule
from thunder_fn.interpreters.simplify import dce, inline_into
from thunder_fn.rules import Mask, memo, rules_of
from thunder_fn.trace import Atom, Dim, Equation, Literal, TensorType, Trace, TraceBuilder, Var

MOVEDIM = ops.leaf(torch.ops.aten.movedim.int)
ROWS: dict[str, str] = {"torch.nn.functional.linear": "input"}
"""Calls that work on the rows of their first argument, whatever dims it has: a batch of that alone is the same call on more rows.
The names of these calls, and of the argument."""


@memo(16384)
def batch(trace: Trace, batched: Mask, size: Dim, randomness: str = "error") -> tuple[Trace, Mask]:
    """Batch a trace whose batched inputs have a leading batch dim; also which outputs are batched."""
    builder = TraceBuilder(f"vmap_{trace.name}")
    builder.require(trace.constraints)
    env: dict[int, Atom] = {}
    flags: dict[int, bool] = {}
    for var, flag in zip(trace.inputs, batched, strict=True):
        env[var.index] = builder.input(batched_type(var.type, size) if flag else var.type)
        flags[var.index] = flag
    for constant in trace.constants:
        env[constant.var.index] = builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
        flags[constant.var.index] = False
    for equation in trace.equations:
        _batch_equation(builder, equation, env, flags, size, randomness)
    outputs = tuple(env[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs)
    return builder.build(outputs), tuple(isinstance(atom, Var) and flags[atom.index] for atom in trace.outputs)


def _batch_equation(
    builder: TraceBuilder, equation: Equation, env: dict[int, Atom], flags: dict[int, bool], size: Dim, randomness: str
) -> None:
    batched = tuple(flags[var.index] for var in equation.operands)
    if not any(batched) and not (ops.has_random(equation) and randomness != "same"):
        results: tuple[Atom, ...] = builder.copy(equation, lambda var: env[var.index])
        out_flags: Mask = (False,) * len(equation.outputs)
    else:
        arguments = tuple(env[var.index] for var in equation.operands)
        new, out_flags = rule_of(equation, batched, size, randomness)
        if is_on_rows(equation, batched):
            results = builder.copy(equation, lambda var: env[var.index], bodies=(new,), types=new.output_types)
        elif equation.op.kind == "composite":
            op = ops.composite(f"vmap_{ops.short_name(equation.op).removeprefix('vmap_')}")
            results = builder.add(op, arguments, new.output_types, bodies=(new,), source=equation.source)
        else:
            results = inline_into(builder, new, arguments, equation.source)
    for var, value, flag in zip(equation.outputs, results, out_flags, strict=True):
        env[var.index] = value
        flags[var.index] = flag and isinstance(var.type, TensorType)


def is_on_rows(equation: Equation, batched: Mask) -> bool:
    """The equation is one of `ROWS`, and nothing but the rows is batched."""
    first = equation.args[0] if equation.args else dict(equation.kwargs).get(ROWS.get(equation.op.name, ""))
    return equation.op.name in ROWS and batched == tuple(var == first for var in equation.operands)


def rule_of(equation: Equation, batched: Mask, size: Dim, randomness: str) -> tuple[Trace, Mask]:
    """The batched equation and which of its outputs are batched."""
    if equation.op.kind == "composite":
        return batch(equation.body, batched, size, randomness)
    if equation.op.kind == "structured":
        return rules_of(equation).batch(equation, batched, size, randomness)
    rule = vmap_rule(alone(equation), batched, size, randomness)
    if isinstance(rule, VmapRule):
        return rule.trace, (True,) * len(equation.outputs)
    return batch(rule, batched, size, randomness)


def move_dim(builder: TraceBuilder, value: Atom, source: int, destination: int) -> Atom:
    """The value with one dim moved."""
    if source == destination:
        return value
    assert isinstance(value, Var) and isinstance(value.type, TensorType), "only tensors are batched"
    shape = list(value.type.shape)
    shape.insert(destination, shape.pop(source))
    type = TensorType(value.type.dtype, tuple(shape), value.type.device)
    (moved,) = builder.add(MOVEDIM, (value, Literal(source), Literal(destination)), (type,))
    return moved


@memo(1024)
def vmap(
    trace: Trace, in_dims: tuple[int | None, ...], size: Dim, randomness: str = "error"
) -> tuple[Trace, tuple[int | None, ...]]:
    """Batch a trace over a new axis.

    Law: ``evaluate(vmap(t, d, n)[0], xs)[k]`` at index i of its batch dim is ``evaluate(t, take(xs, d, i))[k]``, for
    every ``i < n``.

    Args:
        trace: closed and checked.
        in_dims: one per input, not negative; None leaves that input unbatched.
        size: length n of the new axis.
        randomness: "error", "different" or "same": what random ops do.

    Returns:
        The batched trace, and the batch dim of each output, None where it does not depend on the batch. Input i of
        shape s becomes s with n inserted at in_dims[i].

    Raises:
        MissingRule: an op has no batching rule; names it and the user's line.
        VmapError: a random op under randomness="error".

    Source: autodidax part 1; functorch batching rules through derive_vmap.py.
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
