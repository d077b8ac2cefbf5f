"""Recording a structured equation, also inside the transforms of torch.func.

On tracers, followed by autograd or not, the equation is recorded as it is (`capture/apply.py`). If
a torch.func transform has wrapped an operand, the equation becomes a `torch.autograd.Function`. Its
rules are the interpreters': backward is `vjp`, jvp is `jvp_trace`, vmap is `batch`. So torch.func
inside a traced function sees through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current
from thunder_fn.capture.apply import (
    Strides,
    apply_inside,
    bind_structured,
    can_bind,
    replay,
    with_memory,
)
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.scopes import user_source
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.capture.watching import made
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import UnsupportedCall
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import forward_backward, vjp
from thunder_fn.interpreters.jvp import jvp_trace
from thunder_fn.interpreters.vmap import batch
from thunder_fn.ir import ops
from thunder_fn.ir.hooks import machinery
from thunder_fn.ir.rules import Mask, Split, scattered
from thunder_fn.ir.trace import (
    Equation,
    Op,
    Trace,
    TraceBuilder,
    Type,
    as_dim,
    as_kwargs,
    type_of_value,
)

Values = tuple[Any, ...]


def bind(
    recorder: Recorder,
    op: Op,
    values: Sequence[Any],
    bodies: tuple[Trace, ...],
    types: tuple[Type, ...],
    strides: Strides = (),
    /,
    **kwargs: Any,
) -> Values:
    """Record one structured equation on tensors; its results are tracers, with these strides."""
    if can_bind(recorder, values):
        rules = None, split_body
        return bind_structured(
            recorder, op, values, bodies, types, *rules, strides=strides, **kwargs
        )
    builder = TraceBuilder(op.name)
    inputs = tuple(builder.input(type_of_value(value)) for value in values)
    literals = as_kwargs(kwargs)
    source = user_source(recorder)
    single = builder.build(
        builder.add(op, inputs, types, kwargs=literals, bodies=bodies, source=source)
    )
    wrapped = [value if is_wrapped(value) else recorder.lift(value) for value in values]
    draws = any(map(ops.has_effects, bodies))
    if draws and op.name in ops.ON_OPERANDS and not internals.is_batching():  # op by op, draws once
        return replay(recorder, bodies[0], wrapped)
    return tuple(_Wrapped.apply(single, *wrapped)) if types else ()  # type: ignore[no-untyped-call]


def _check_draws_once(trace: Trace) -> None:
    """Refuse the derivative of a trace that draws random numbers, because it would draw others. An
    effect would come twice.
    """
    if ops.has_effects(trace):
        raise UnsupportedCall(
            f"torch.func differentiates a {trace.name} that draws random numbers or has another"
            " effect, and would run it again for the derivative",
            source=user_source(),
            fix="Use thunder_fn's own grad, vjp and jvp inside the traced function.",
        )


def bind_composite(recorder: Recorder, name: str, body: Trace, values: Sequence[Any]) -> Values:
    """Record a trace on tensors as one equation, one node of autograd's graph; op by op inside
    torch.func.
    """
    return apply_inside(recorder, body, values, ops.composite(name), split_body)


def split_body(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Split a composite: its body in two."""
    return forward_backward(equation.body, wanted_inputs, wanted_outputs)


class _Wrapped(torch.autograd.Function):
    """A trace as an op that torch.func can differentiate and batch."""

    @staticmethod
    def forward(trace: Trace, *values: Any) -> Values:  # type: ignore[override]
        recorder = current()
        assert recorder is not None, "called inside a capture only"
        with torch.enable_grad(), internals.forward_mode_on():
            plain = [torch.ops.aten.detach.default(value) for value in values]
            return replay(recorder, trace, plain)

    @staticmethod
    def setup_context(ctx: Any, inputs: Values, output: Values) -> None:
        ctx.trace, *values = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*values)
        ctx.save_for_forward(*values)
        fixed = [value for value in output if not is_differentiable(type_of_value(value))]
        ctx.mark_non_differentiable(*fixed)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Values:
        trace: Trace = ctx.trace
        wanted = tuple(ctx.needs_input_grad[1:])
        given = tuple(cotangent is not None for cotangent in cotangents)
        if not any(given) or not any(wanted):
            return (None,) * (1 + len(wanted))
        _check_draws_once(trace)
        new = vjp(trace, wanted, given)
        arguments = (
            *ctx.saved_tensors,
            *(cotangent for cotangent in cotangents if cotangent is not None),
        )
        return (None, *scattered(_replayed(new, arguments)[len(trace.outputs) :], wanted))

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Values:  # pyright: ignore[reportIncompatibleMethodOverride]
        tangents = given[1:]  # the first stands for the trace
        active = tuple(tangent is not None for tangent in tangents)
        _check_draws_once(ctx.trace)
        rule = jvp_trace(ctx.trace, active)
        arguments = (*ctx.saved_tensors, *(tangent for tangent in tangents if tangent is not None))
        results = _replayed(rule.trace, arguments)
        found = scattered(results[len(ctx.trace.outputs) :], rule.active_outputs)
        return tuple(
            torch.zeros_like(value)
            if tangent is None and is_differentiable(type_of_value(value))
            else tangent
            for value, tangent in zip(results, found, strict=False)
        )

    @staticmethod
    def vmap(info: Any, in_dims: Values, *given: Any) -> tuple[Values, Values]:
        trace, *values = given
        flags = tuple(dim is not None for dim in in_dims[1:])
        moved = [
            value if dim is None else value.movedim(dim, 0)
            for value, dim in zip(values, in_dims[1:], strict=True)
        ]
        new, batched = batch(trace, flags, as_dim(info.batch_size), info.randomness)
        return _replayed(new, moved), tuple(0 if flag else None for flag in batched)


def _replayed(trace: Trace, values: Sequence[Any]) -> Values:
    """Run op by op: whatever is at work sees the ops, and the structured equations come here
    again.
    """
    recorder = current()
    assert recorder is not None, "called inside a capture only"
    return replay(recorder, trace, values)


@machinery
def apply(name: str, new: Trace, inputs: Sequence[Any], of: Trace) -> tuple[Any, ...]:
    """Run a trace that was made of another one on tensors, or record it where a capture is going
    on.
    """
    made(name, new, of)
    recorder = current()
    if recorder is None:
        return evaluate(new, inputs)
    return with_memory(
        recorder, new, inputs, lambda trace: bind_composite(recorder, name, trace, inputs)
    )
