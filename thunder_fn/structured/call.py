"""call: a jitted function that is called inside a traced one.

    outputs = call(*operands, name=..., options=...)      one body, on the operands

The body is what the inner `jit` traced, its own transforms applied, closed. `options` are the inner
function's, and nothing here looks at them. An executor that meets the equation reads the inner
function's executors, and unfolds the body if they are its own.

Law: a call computes its body, and every transform of it is a call, with the same name and options,
of the transformed body.

Source: JAX's `jit` primitive.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from thunder_fn.capture import current
from thunder_fn.capture.apply import Strides
from thunder_fn.capture.recorder import Recorder
from thunder_fn.errors import InvalidTrace
from thunder_fn.interpreters.carried import self_contained
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.partial_eval import partial_eval
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    FREE_TYPES,
    PARTIAL_EVAL,
    VJP,
    VMAP,
    Mask,
    Split,
)
from thunder_fn.ir.trace import Equation, Op, Trace
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.running import body_function
from thunder_fn.structured.shared.wrapping import (
    wrapped_again,
    wrapper_check_rule,
    wrapper_dce_rule,
    wrapper_vmap_rule,
)

CALL = Op("structured", "call")


def call_options(equation: Equation) -> tuple[str, Hashable]:
    """The name of the function that is called, and the options that it was jitted with."""
    values = equation.literals
    return values["name"], values["options"]


# ---- check ----


@CHECK.rule("call")
def call_check_rule(equation: Equation) -> None:
    """Check one body on the operands whose types the outputs have, a name, and options."""
    if [key for key, _ in equation.kwargs] != ["name", "options"]:
        raise InvalidTrace("call: takes name= and options=", source=equation.source)
    wrapper_check_rule(equation)


# ---- evaluate ----


@EVALUATE.rule("call")
def call_evaluate_rule(
    bodies: Sequence[Trace], *operands: Any, name: str, options: Hashable
) -> tuple[Any, ...]:
    """Run the body; inside a capture, record the equation."""
    recorder, (body,) = current(), bodies
    if recorder is None:
        return tuple(body_function(body)(*operands))
    return bind_call(recorder, body, operands, name, options)


def bind_call(
    recorder: Recorder,
    body: Trace,
    operands: Sequence[Any],
    name: str,
    options: Hashable,
    strides: Strides = (),
) -> tuple[Any, ...]:
    """Record a call of a closed body on tensors."""
    types = body.output_types
    return bind(recorder, CALL, operands, (body,), types, strides, name=name, options=options)


# ---- split ----


@VJP.rule("call")
def call_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """A call of the body's forward, and a call of its backward."""
    split = self_contained(forward_backward(equation.body, wanted_inputs, wanted_outputs))
    forward, backward = (wrapped_again(equation, half) for half in (split.forward, split.backward))
    return Split(forward, backward, split.residuals, split.gradients)


# ---- partial evaluation ----


@PARTIAL_EVAL.rule("call")
def call_divide_rule(equation: Equation, known: Mask, flags: Mask) -> tuple[Trace, Trace]:
    """A call of each half of the body."""
    return partial_eval(equation.body, known, flags)


VMAP.enter(wrapper_vmap_rule, "call")
DCE.enter(wrapper_dce_rule, "call")
FREE_TYPES.enter(True, "call")
