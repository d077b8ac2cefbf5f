"""straight_through and no_grad_write: the value of one tensor with the derivatives of another.

    output = straight_through(value, history)
    output = no_grad_write(value, history)

Both stand for an in-place change that autograd does not follow. Gradients of later uses flow to the
earlier value, unchanged. Where `x.detach()` is written to, tangents do so too. Where x is written
to under `no_grad`, which does not turn forward mode off, the tangent is that of the new value, as
in torch.func.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn.capture import current
from thunder_fn.capture.apply import bind_equation, operands_of
from thunder_fn.derived.activity import ACTIVE
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import InvalidTrace
from thunder_fn.interpreters.grad import zeros
from thunder_fn.interpreters.vmap import batched_types, expand_missing
from thunder_fn.ir import ops
from thunder_fn.ir.check import check_types
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    JVP,
    LOWER,
    VJP,
    VMAP,
    JvpRule,
    Mask,
    Split,
    chosen,
    keep_all,
)
from thunder_fn.ir.trace import Dim, Equation, Op, Trace, TraceBuilder, Var, type_of, type_of_value
from thunder_fn.structured.shared.bodies import tensor_type


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, cotangents[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[1].view_as(tangents[1])


class _NoGradWrite(_StraightThrough):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _NoGradWrite.apply(*tangents)


@CHECK.rule("straight_through", "no_grad_write", "pushed_write")
def straight_through_check_rule(equation: Equation) -> None:
    """Check for two tensors of one type, which is the output's."""
    operands = equation.operands
    if len(operands) != 2 or equation.bodies:
        what = (
            f"{equation.op} takes two tensors, the value and the one that gets the gradient, and no"
            " bodies"
        )
        raise InvalidTrace(what, source=equation.source)
    for var in operands:
        check_types(equation, (var.type,), "an operand is")


def _evaluate(
    op: Op, function: type[_StraightThrough], value: Any, history: Any
) -> tuple[Any, ...]:
    recorder = current()
    args = operands_of(recorder, (value, history)) if recorder is not None else None
    if recorder is not None and args is not None:
        return bind_equation(recorder, op, args, (), (type_of_value(value),))
    return (function.apply(value, history),)


@EVALUATE.rule("straight_through")
def straight_through_evaluate_rule(
    bodies: Sequence[Trace], value: Any, history: Any
) -> tuple[Any, ...]:
    """The value; autograd and torch.func see the other's derivatives."""
    return _evaluate(ops.STRAIGHT_THROUGH, _StraightThrough, value, history)


@EVALUATE.rule("no_grad_write")
def no_grad_write_evaluate_rule(
    bodies: Sequence[Trace], value: Any, history: Any
) -> tuple[Any, ...]:
    """The value; autograd sees the other's gradient."""
    return _evaluate(ops.NO_GRAD_WRITE, _NoGradWrite, value, history)


@ACTIVE.rules.rule("straight_through", "no_grad_write")
def straight_through_activity_rule(equation: Equation, active: Mask) -> Mask:
    """Active if the history is."""
    return (active[1] and is_differentiable(equation.outputs[0].type),)


@ACTIVE.rules.rule("pushed_write")
def pushed_write_activity_rule(equation: Equation, active: Mask) -> Mask:
    """Active if the value is, or the history."""
    return (any(active) and is_differentiable(equation.outputs[0].type),)


@JVP.rule("pushed_write")
def pushed_write_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """The value with its tangent; to reverse mode both are the history's."""
    builder = TraceBuilder("no_grad_write")
    primals = builder.take(equation.operand_types)
    type = tensor_type(equation.outputs[0].type)
    given = builder.take_some((type, type), active)
    tangents = tuple(zeros(builder, type) if tangent is None else tangent for tangent in given)
    return JvpRule(
        builder.build(
            tuple(builder.add(equation.op, pair, (type,))[0] for pair in (primals, tangents))
        ),
        (True,),
    )


@JVP.rule("straight_through")
def straight_through_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """The op, whose derivatives of every order are the history's, with the tangent of the
    history.
    """
    builder = TraceBuilder("straight_through")
    primals = builder.take(equation.operand_types)
    tangents = builder.take(var.type for var in chosen(equation.operands, active))
    results = builder.add(equation.op, primals, (equation.outputs[0].type,))
    return JvpRule(
        builder.build((*results, *tangents[-1:]) if active[1] else results), (active[1],)
    )


@VJP.rule("straight_through", "no_grad_write")
def straight_through_vjp_rule(
    equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask
) -> Split:
    """Forward is the op; backward hands the cotangent to the history."""
    value, history = (Var(i, var.type) for i, var in enumerate(equation.operands))
    output = Var(2, value.type)
    again = Equation(equation.op, (value, history), (), (output,), source=equation.source)
    forward = Trace((value, history), (again,), (output,), (), (), "forward")
    cotangent = Var(0, value.type)
    backward = Trace((cotangent,), (), (cotangent,), (), (), "backward")
    places: tuple[int | None, ...] = (None, 0)
    return Split(forward, backward, (), chosen(places, wanted_inputs))


@VMAP.rule("straight_through", "no_grad_write")
def straight_through_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """Return the op on batches; operands that are not batched are expanded."""
    builder = TraceBuilder("straight_through")
    operands = builder.take(batched_types(equation.operand_types, batched, size))
    wide = expand_missing(builder, operands, batched, (any(batched),) * 2, size)
    results = builder.add(equation.op, wide, (type_of(wide[0]),), source=equation.source)
    return builder.build(results), (any(batched),)


@LOWER.rule("straight_through", "no_grad_write")
def straight_through_lower_rule(equation: Equation) -> Trace:
    """The value, as a tensor of its own: with one history or without, it is no result that
    another one is.
    """
    value, history = (Var(i, var.type) for i, var in enumerate(equation.operands))
    output = Var(2, value.type)
    alias = Equation(ops.STOP_GRADIENT, (value,), (), (output,), source=equation.source)
    return Trace((value, history), (alias,), (output,), (), (), "straight_through")


DCE.enter(keep_all, "straight_through", "no_grad_write", "pushed_write")
