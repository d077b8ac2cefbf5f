"""custom_jvp: a function with its own derivative, for both directions.

    outputs = custom_jvp(*operands, rule=call)

The operands are the tensors of the arguments, then what the functions close over. The bodies are

    primal: operands                      -> outputs
    jvp:    arguments, tangents, closures -> outputs, tangents of the outputs

with one tangent for each differentiable tensor of the arguments and one for each differentiable
output. As with custom_vjp, the second body is there if it could be captured with the call. A rule
that calls the function itself is captured when a derivative asks for it.

Reverse mode transposes the rule, which is linear in the tangents. The rule is split into a part
without tangents, which runs forward, and a linear rest, whose vjp is the backward. vmap batches
both bodies.

Source: jax.custom_jvp for the semantics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.capture import Captured
from thunder_fn.capture.numbers.python_numbers import running_zeros
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.rewriting import rules_in_context
from thunder_fn.derived.activity import ACTIVE
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import CaptureError, InvalidTrace, spelled
from thunder_fn.interpreters.grad import forward_backward, zeros
from thunder_fn.interpreters.partial_eval import partial_split
from thunder_fn.interpreters.simplify import dce
from thunder_fn.interpreters.vmap import batch, batched_outputs
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import (
    CHECK,
    DCE,
    EVALUATE,
    JVP,
    VJP,
    VMAP,
    JvpRule,
    Mask,
    Split,
    chosen,
    keep_all,
    scattered,
)
from thunder_fn.ir.trace import Dim, Equation, Literal, Op, TensorType, Trace, TraceBuilder, Type
from thunder_fn.ir.walking import inline_into
from thunder_fn.spellings import no_such_name
from thunder_fn.structured.shared import custom_calls as calls
from thunder_fn.structured.shared.custom_calls import Call, F, P, R
from thunder_fn.structured.shared.side_effects import without_side_effects
from thunder_fn.structured.shared.wrapping import wrapped

CUSTOM_JVP = Op("structured", "custom_jvp")


# ---- check ----


@CHECK.rule("custom_jvp")
def custom_jvp_check_rule(equation: Equation) -> None:
    """Check the primal body on the operands, and that the jvp, where it is there, fits it."""
    check_operands(equation, equation.operands, equation.bodies[0])
    check_types(equation, equation.bodies[0].output_types, "the body gives")
    if len(equation.bodies) == 1:
        return
    rule, count = equation.bodies[1], num_args(equation)
    types = equation.operand_types
    tangents = [type for type in types[:count] if is_differentiable(type)]
    if rule.input_types != (*types[:count], *tangents, *types[count:]):
        raise InvalidTrace(
            f"custom_jvp: the rule takes {rule.input_types}, not arguments, tangents and closures"
        )
    results = equation.output_types
    if rule.output_types != (*results, *(type for type in results if is_differentiable(type))):
        raise InvalidTrace(
            f"custom_jvp: the rule gives {rule.output_types}, not outputs and their tangents"
        )


def num_args(equation: Equation) -> int:
    """The number of operands that are tensors of the arguments."""
    return sum(equation.literals["rule"].is_tensor)


# ---- evaluate ----


@EVALUATE.rule("custom_jvp")
def custom_jvp_evaluate_rule(
    bodies: Sequence[Trace], *operands: Any, **options: Any
) -> tuple[Any, ...]:
    """Run the primal function, with the rule where autograd looks."""
    return calls.evaluate_custom(CUSTOM_JVP, bodies, operands, options)


# ---- jvp ----


@ACTIVE.rules.rule("custom_jvp")
def custom_jvp_activity_rule(equation: Equation, active: Mask) -> Mask:
    """Mark every differentiable output as dependent on every tensor argument."""
    count = num_args(equation)
    calls.check_closures(equation, equation.literals["rule"], count, active)
    any_active = any(active[:count])
    return tuple(any_active and is_differentiable(var.type) for var in equation.outputs)


@JVP.rule("custom_jvp")
def custom_jvp_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """The user's rule, with zeros for the tangents that are absent."""
    equation, count = expanded(equation), num_args(equation)
    builder = TraceBuilder("custom_jvp_jvp")
    primals = builder.take(equation.operand_types)
    given = builder.take_some(equation.operand_types, active)
    tangents = [
        zeros(builder, primal.type) if tangent is None else tangent
        for primal, tangent in zip(primals[:count], given[:count], strict=True)
        if isinstance(primal.type, TensorType) and is_differentiable(primal.type)
    ]
    results = inline_into(
        builder, equation.bodies[1], (*primals[:count], *tangents, *primals[count:])
    )
    outputs = custom_jvp_activity_rule(equation, active)
    kept = results if any(outputs) else results[: len(equation.outputs)]
    return JvpRule(dce(builder.build(kept)), outputs)


def expanded(equation: Equation) -> Equation:
    """The equation with its rule, captured now if it was not with the call."""
    if len(equation.bodies) == 2:
        return equation
    types = equation.operand_types
    primal, call = equation.bodies[0], equation.literals["rule"]
    bodies = (primal, capture_rule(call, primal, types))
    return replace(equation, bodies=bodies)


@rules_in_context
def capture_rule(call: Any, primal: Trace, types: tuple[Type, ...]) -> Trace:
    """Capture the rule for operands of these types; what it closes over become constants."""
    if hasattr(call, "capture"):  # not captured yet, or not in the file that it was read from
        return call.capture()
    count = sum(call.is_tensor)

    def run() -> Trace:
        examples = calls.examples_of(types[:count])
        captured = calls.captured_body("custom_jvp", call.primal, examples)
        return capture_jvp(call, captured, examples).trace

    rule = calls.inside_capture(run, call.begun)
    return calls.with_inputs(rule, (*rule.input_types, *types[count:]))


def capture_jvp(call: Any, primal: Captured, tensors: Sequence[Any]) -> Captured:
    """Capture the user's rule on tensors and tracers of their tangents."""
    types = primal.trace.input_types
    tangents = calls.examples_of([type for type in types if is_differentiable(type)])

    def jvp(*values: Any) -> Any:
        return call.jvp(primal, values[: len(types)], values[len(types) :])

    jvp.__name__ = f"{call.name}_jvp"
    capture = lambda _: (calls.captured_body("custom_jvp", jvp, (*tensors, *tangents)),)
    with calls.capturing_rule_of(call.function):
        (captured,) = without_side_effects(
            "custom_jvp", (call.function.rule,), capture, is_rule=True, given=call.reached
        )
    return captured


# ---- split ----


@VJP.rule("custom_jvp")
def custom_jvp_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Transpose the rule."""
    wanted = tuple(flag and index < num_args(equation) for index, flag in enumerate(wanted_inputs))
    rule = custom_jvp_jvp_rule(equation, wanted)
    split = transposed(rule, wanted, wanted_outputs, len(equation.outputs))
    asked = split.places(chosen(wanted, wanted_inputs))
    return Split(split.forward, split.backward, split.residuals, asked)


# ---- vmap ----


@VMAP.rule("custom_jvp")
def custom_jvp_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """Batch both bodies; every output counts as batched."""
    primal, flags = batch(equation.bodies[0], batched, size, randomness)
    call = equation.literals["rule"]
    wanted = tuple(isinstance(var.type, TensorType) for var in equation.outputs)
    types = equation.operand_types
    if len(equation.bodies) == 1:
        primal_of_one = equation.bodies[0]
        call = BatchedCall(call, primal_of_one, types, batched, wanted, size, randomness)
        rest = ()
    else:
        rest = (
            _batched_jvp(
                equation.bodies[1], types[: num_args(equation)], batched, size, randomness
            ),
        )
    bodies = (batched_outputs(primal, flags, wanted, size), *rest)
    return wrapped(CUSTOM_JVP, (("rule", Literal(call)),), *bodies), wanted


def _batched_jvp(
    rule: Trace, types: Sequence[Type], batched: Mask, size: Dim, randomness: str
) -> Trace:
    count = len(types)
    tangents = chosen(batched[:count], map(is_differentiable, types))
    trace, flags = batch(rule, (*batched[:count], *tangents, *batched[count:]), size, randomness)
    return batched_outputs(
        trace, flags, tuple(isinstance(type, TensorType) for type in rule.output_types), size
    )


class BatchedCall(calls.BatchedRule):
    """A call in a batch whose rule has not been captured yet."""

    @property
    def is_tensor(self) -> Mask:
        """Return the call's own flags."""
        return self.call.is_tensor

    def capture(self) -> Trace:
        """The rule of the call of one example, in batches."""
        rule = capture_rule(self.call, self.primal, self.types)
        return _batched_jvp(
            rule, self.types[: sum(self.is_tensor)], self.batched, self.size, self.randomness
        )


DCE.enter(keep_all, "custom_jvp")


# ---- for users ----


class JvpCall(Call):
    """A call of a `custom_jvp` function, and the use of its rule."""

    def jvp(self, primal: Captured, tensors: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """The outputs and the tangents of the differentiable ones, from the user's rule."""
        where = f"custom_jvp: the rule of {self.name}"
        directions = scattered(tangents, map(is_differentiable, primal.trace.input_types))
        found = self.function.rule(
            *self.static_args, self.tree(tensors), self.tree(directions, lambda leaf: None)
        )
        output, tangent = calls.pair_of(found, "(output, tangent)", where)
        outputs = calls.tensors_like(output, primal, "out", where)
        tangents_out = calls.tensors_like(tangent, primal, "tangent", where, or_none=True)
        types = [type for type in primal.trace.output_types if isinstance(type, TensorType)]
        filled = [
            running_zeros(type) if value is None else value
            for value, type in zip(tangents_out, types, strict=True)
            if is_differentiable(type)
        ]
        return (*outputs, *filled)


class custom_jvp(calls.CustomFunction[P, R]):
    """A function whose derivative is yours, in forward and in reverse mode.

    Law: ``jvp(f)`` is the rule; ``vjp(f)`` is its transpose; everything else sees f.

    Args:
        f: any PyTorch callable.
        nondiff_argnums: arguments that are static, such as numbers and functions. They come first
            in the rule.

    Then `f.defjvp(rule)`: `rule(primals, tangents)` returns `(output, tangent)`. Both arguments are
    tuples with one entry for each argument of f. The tangents of values that are no floating
    tensors are None, and so may be the rule's result for a zero tangent. The rule must be linear in
    the tangents.

    Raises:
        CustomRuleError: f has no rule where one is needed, the rule returns something that does not
            fit f, or f closes over a tensor that is differentiated.

    Example:
        >>> from thunder_fn import grad
        >>> @custom_jvp
        ... def softplus(x):
        ...     return torch.log1p(torch.exp(x))
        >>> @softplus.defjvp
        ... def softplus_jvp(primals, tangents):
        ...     (x,), (t,) = primals, tangents
        ...     return softplus(x), torch.sigmoid(x) * t
        >>> grad(lambda x: softplus(x).sum())(torch.tensor([200.0]))
        tensor([1.])

    Source: jax.custom_jvp.
    """

    asked_for = "defjvp(rule)` before differentiating"

    @spelled(
        jvp="rule",
        symbolic_zeros="Leave it out: tangents that are zero are tensors of zeros.",
    )
    def defjvp(self, rule: F) -> F:
        """Set the rule, and return it, so that this is a decorator."""
        self._check_functions(rule)
        self._check_takes(rule, "the primals", "the tangents")
        self._rule = rule
        return rule

    def __getattr__(self, name: str) -> Any:
        raise no_such_name("thunder_fn:custom_jvp", name)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.called(JvpCall, _bind, args, kwargs)


def _bind(recorder: Recorder, call: JvpCall, tensors: Sequence[torch.Tensor]) -> Any:
    captured = [calls.captured_body("custom_jvp", call.primal, tensors)]
    if call.function.has_rule and not calls.is_being_captured(call.function):
        # it is tried again, and fails, where a derivative asks for it
        with contextlib.suppress(CaptureError):
            captured.append(capture_jvp(call, captured[0], tensors))
    return calls.bind_captured(recorder, CUSTOM_JVP, call, captured, tensors, rule=call)


# ---- reverse mode ----


@memo(4096)
def transposed(rule: JvpRule, active: Mask, wanted_outputs: Mask, count: int) -> Split:
    """Split a jvp that is linear in its tangents into a forward and a backward.

    Law: for every tangent v and cotangent ct, ``<ct, jvp(v)> == <backward(ct), v>``.

    Args:
        rule: takes the primals, then a tangent for each active one.
        count: how many of the rule's outputs are the function's; tangents follow.
    """
    # Before: rule:     primals, tangents -> outputs, tangents of the active outputs
    # After:  forward:  primals -> outputs, residuals
    #         backward: residuals, cotangents -> gradients of the active primals
    # The linear part, residuals and tangents -> tangents, is split at zero tangents; what its own
    # forward computes there is no more than what the backward reads.
    num_primals, num_tangents = len(active), sum(active)
    known_outputs = (True,) * count + (False,) * (len(rule.trace.outputs) - count)
    halves = partial_split(
        rule.trace, (True,) * num_primals + (False,) * num_tangents, known_outputs
    )
    linear, num_kept = halves.backward, len(halves.residuals)
    moved = chosen(wanted_outputs, rule.active_outputs)
    back = forward_backward(linear, (False,) * num_kept + (True,) * num_tangents, moved)
    builder = TraceBuilder(f"{rule.trace.name}_transposed")
    kept = [builder.input(type) for type in linear.input_types[:num_kept]]
    given = [
        builder.input(type)
        for type, wanted in zip(rule.trace.output_types[:count], wanted_outputs, strict=True)
        if wanted
    ]
    nothing = [
        zeros(builder, var.type)
        for var in linear.inputs[num_kept:]
        if isinstance(var.type, TensorType)
    ]
    results = inline_into(builder, back.forward, (*kept, *nothing))
    residuals = back.residual_values((*kept, *nothing), results)
    gradients = inline_into(builder, back.backward, (*residuals, *given))
    return Split(
        dce(halves.forward), dce(builder.build(gradients)), halves.residuals, back.gradients
    )
