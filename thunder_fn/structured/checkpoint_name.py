"""checkpoint_name: an identity that gives a value a name, for policies and for people.

    y = checkpoint_name(x, name="attention")

Inside `checkpoint`, a value that a policy has chosen carries its answer with it:
`checkpoint_name(x, answer="save")`. Tangents and cotangents pass by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn.capture import current
from thunder_fn.derived.activity import ACTIVE
from thunder_fn.derived.leaf_vmap import batched_type
from thunder_fn.errors import CheckpointError, kind_of
from thunder_fn.ir.check import check_types
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    FREE_TYPES,
    JVP,
    LOWER,
    VJP,
    VMAP,
    JvpRule,
    Mask,
    Residual,
    Split,
    keep_all,
)
from thunder_fn.ir.trace import Dim, Equation, Op, Trace, TraceBuilder, Type, Var, type_of_value
from thunder_fn.structured.shared.bind import bind

NAME = Op("structured", "checkpoint_name")


def name_of(equation: Equation) -> str | None:
    """The name that an equation gives, None if it gives none."""
    return equation.literals.get("name") if equation.op == NAME else None


@CHECK.rule("checkpoint_name")
def name_check_rule(equation: Equation) -> None:
    """Check for one operand whose type the output has."""
    check_types(equation, equation.operand_types, "the operand is")


@EVALUATE.rule("checkpoint_name")
def name_evaluate_rule(bodies: Sequence[Trace], value: Any, **labels: Any) -> tuple[Any, ...]:
    """The value; inside a capture, recorded."""
    recorder = current()
    if recorder is None or not isinstance(value, torch.Tensor):
        return (value,)
    return bind(recorder, NAME, (value,), (), (type_of_value(value),), **labels)


@ACTIVE.rules.rule("checkpoint_name")
def name_activity_rule(equation: Equation, active: Mask) -> Mask:
    """Return the activity of the operand."""
    return active


@JVP.rule("checkpoint_name")
def name_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """Name the primal, pass the tangent."""
    builder = TraceBuilder("checkpoint_name_jvp")
    type = equation.operands[0].type
    value, tangent = builder.input(type), builder.input(type)
    return JvpRule(builder.build((*_named(builder, equation, value), tangent)), active)


@VJP.rule("checkpoint_name")
def name_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Name the value, pass the cotangent."""
    identity = TraceBuilder("checkpoint_name_backward")
    cotangent = identity.input(equation.operands[0].type)
    residuals: tuple[Residual, ...] = ()
    return Split(
        _alone(equation, equation.operands[0].type), identity.build((cotangent,)), residuals, (0,)
    )


@VMAP.rule("checkpoint_name")
def name_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """Name the batch."""
    return _alone(equation, batched_type(equation.operands[0].type, size)), (True,)


DCE.enter(keep_all, "checkpoint_name")


@LOWER.rule("checkpoint_name")
def name_lower_rule(equation: Equation) -> Trace:
    """Lower to the operand itself."""
    builder = TraceBuilder("checkpoint_name")
    return builder.build((builder.input(equation.operands[0].type),))


def _named(builder: TraceBuilder, equation: Equation, value: Var) -> tuple[Var, ...]:
    return builder.add(
        NAME, (value,), (value.type,), kwargs=equation.kwargs, source=equation.source
    )


def _alone(equation: Equation, type: Type) -> Trace:
    builder = TraceBuilder("checkpoint_name")
    return builder.build(_named(builder, equation, builder.input(type)))


FREE_TYPES.enter(True, "checkpoint_name")


# ---- for users ----


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name a value for checkpoint policies and `saved_residuals`.

    Law: ``checkpoint_name(x, n)`` is x.

    Raises:
        CheckpointError: x is no tensor, or the name no string.

    Example:
        >>> checkpoint_name(torch.ones(2), "hidden")
        tensor([1., 1.])

    Source: jax.ad_checkpoint.checkpoint_name.
    """
    if not isinstance(x, torch.Tensor):
        raise CheckpointError(f"checkpoint_name: names a tensor, not {kind_of(x)}")
    if not isinstance(name, str):
        raise CheckpointError(f"checkpoint_name: the name is a string, not {name!r}")
    (named,) = name_evaluate_rule((), x, name=name)
    return named
