"""opaque: a Python function of which only the types of its results are known.

    outputs = opaque(*operands, call=call)      no body

`call` is hashable; `call.run(*operands)` gives the outputs, `call.name` says in errors whose
function it is. It has no derivative: what knows better wraps it in a custom rule. vmap runs it in
a loop, with a warning, unless the call has a rule.

Source: jax.pure_callback.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from thunder_fn.capture import current
from thunder_fn.derived.activity import ACTIVE
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.derived.leaf_vmap import LoopWarning, batched_type
from thunder_fn.errors import InvalidTrace, MissingRule
from thunder_fn.interpreters.vmap import batched_types
from thunder_fn.ir import ops
from thunder_fn.ir.constraints import equals_hint
from thunder_fn.ir.rules import CHECK, DCE, EVALUATE, JVP, VJP, VMAP, JvpRule, Mask, Split, keep_all
from thunder_fn.ir.symbols import hint_of
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    Expr,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
)
from thunder_fn.structured.shared.bind import bind
from thunder_fn.torch_internals import any_followed

OPAQUE = Op("structured", "opaque")


class OpaqueCall(Protocol):
    """One call of an opaque function."""

    @property
    def name(self) -> str:
        """The owner of the function."""
        ...

    @property
    def types(self) -> tuple[Type, ...]:
        """The types of the outputs."""
        ...

    def run(self, *operands: Any) -> tuple[Any, ...]:
        """Compute the outputs."""
        ...


@runtime_checkable
class BatchedCall(OpaqueCall, Protocol):
    """A call that has a batching rule, or may have one."""

    def batched(
        self, types: tuple[Type, ...], flags: Mask, size: Dim, randomness: str
    ) -> tuple[Trace, Mask] | None:
        """The batched call, as a rule of vmap gives it; None for a loop."""
        ...


def call_of(equation: Equation) -> OpaqueCall:
    """The call that the equation records."""
    return equation.literals["call"]


@CHECK.rule("opaque")
def opaque_check_rule(equation: Equation) -> None:
    """Check that the outputs have the call's types."""
    if equation.output_types != call_of(equation).types:
        raise InvalidTrace(f"opaque: the results of {call_of(equation).name} have other types")


@EVALUATE.rule("opaque")
def opaque_evaluate_rule(
    bodies: Sequence[Trace], *operands: Any, call: OpaqueCall
) -> tuple[Any, ...]:
    """Run the function; inside a capture, record the call."""
    recorder = current()
    if recorder is not None:
        return bind(recorder, OPAQUE, operands, (), call.types, call=call)
    if any_followed([value for value in operands if isinstance(value, torch.Tensor)]):
        raise missing("autograd", call)
    return call.run(*operands)


def missing(interpreter: str, call: OpaqueCall, equation: Equation | None = None) -> MissingRule:
    """The error for a derivative that nobody has given."""
    return MissingRule(
        f"{interpreter}: {call.name} has no derivative: only the types of its results are known",
        source=equation.source if equation is not None else None,
        fix=(
            "Register it with `like=`, with a `grad_transform=` for reverse mode, or with"
            " `jvp=`, which serves both."
        ),
    )


@ACTIVE.rules.rule("opaque")
def opaque_activity_rule(equation: Equation, active: Mask) -> Mask:
    """Mark every differentiable output as dependent on every operand."""
    return tuple(any(active) and is_differentiable(var.type) for var in equation.outputs)


@JVP.rule("opaque")
def opaque_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """Raise: there is no such rule."""
    raise missing("jvp", call_of(equation), equation)


@VJP.rule("opaque")
def opaque_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Raise: there is no such rule."""
    raise missing("vjp", call_of(equation), equation)


@VMAP.rule("opaque")
def opaque_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """The call's own rule, or one call for each example and a stack of their results."""
    call = call_of(equation)
    if isinstance(call, BatchedCall):
        rule = call.batched(equation.operand_types, batched, size, randomness)
        if rule is not None:
            return rule
    name = call.name
    warnings.warn(
        f"vmap: {name} has no batching rule, so it runs in a loop over {size} examples",
        LoopWarning,
        2,
    )
    builder = TraceBuilder(f"vmap_{name}")
    inputs = builder.take(batched_types(equation.operand_types, batched, size))
    if isinstance(size, Expr):
        builder.require([equals_hint(size)])
    rows = [_example(builder, equation, inputs, batched, i) for i in range(hint_of(size))]
    columns = [_stacked(builder, column) for column in zip(*rows, strict=True)]
    return builder.build(tuple(columns)), (True,) * len(columns)


def _example(
    builder: TraceBuilder, equation: Equation, inputs: Sequence[Atom], batched: Mask, i: int
) -> tuple[Atom, ...]:
    operands: list[Atom] = []
    for var, value, flag in zip(equation.operands, inputs, batched, strict=True):
        if flag:
            args = (value, Literal(0), Literal(i))
            (value,) = builder.add(
                ops.leaf(ops.aten.select.int), args, (var.type,), source=equation.source
            )
        operands.append(value)
    types = equation.output_types
    return builder.add(
        OPAQUE, tuple(operands), types, kwargs=equation.kwargs, source=equation.source
    )


def _stacked(builder: TraceBuilder, column: Sequence[Atom]) -> Atom:
    first = column[0]
    assert not isinstance(first, Literal) and isinstance(first.type, TensorType), (
        "results are tensors"
    )
    type = batched_type(first.type, len(column))
    return ops.emit(builder, ops.aten.stack.default, (column,), type)


DCE.enter(keep_all, "opaque")
