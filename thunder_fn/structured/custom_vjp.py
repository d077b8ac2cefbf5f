"""custom_vjp: a function with its own backward.

    outputs = custom_vjp(*operands, rule=call, gradients=places)

The operands are the tensors of the arguments, then what the functions close over. The bodies are

    primal: operands                       -> outputs
    fwd:    operands                       -> outputs, residuals
    bwd:    residuals, cotangents, closures -> gradients

with one cotangent for each differentiable output. `gradients` says for each tensor of the arguments
which gradient is its own, None for zero. fwd and bwd are captured with the call where they can be.
fwd may call the function itself, as it usually does, or one of them may fail to trace. Then only
the primal body is there, and they are captured when a derivative asks for them.

vjp is fwd and bwd; jvp differentiates the primal function; vmap batches all bodies. fwd and bwd may
close over tensors, which are constants for the rule. That f closes over what is differentiated is
an error, as in JAX.

Source: jax.custom_vjp for the semantics.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import Captured
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.rewriting import rules_in_context
from thunder_fn.derived.activity import ACTIVE
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import CaptureError, CustomRuleError, InvalidTrace, spelled
from thunder_fn.interpreters.grad import zeros
from thunder_fn.interpreters.jvp import jvp_trace, transposed_twice
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
    Residual,
    Split,
    chosen,
    keep_all,
    numbered,
)
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
    cut,
    type_of_value,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.custom_vjp_rules import (
    BatchedCall,
    Places,
    VjpCall,
    batched_rule,
    capture_forward_and_backward,
    capture_jvp,
    capture_rule,
    capture_vmap,
)
from thunder_fn.structured.shared import custom_calls as calls
from thunder_fn.structured.shared.custom_calls import P, R
from thunder_fn.structured.shared.wrapping import wrapped

CUSTOM_VJP = Op("structured", "custom_vjp")


# ---- check ----


@CHECK.rule("custom_vjp")
def custom_vjp_check_rule(equation: Equation) -> None:
    """Check the primal body on the operands, and that fwd and bwd, where they are there, fit it
    and each other.
    """
    primal, *rest = equation.bodies
    check_operands(equation, equation.operands, primal)
    check_types(equation, primal.output_types, "the body gives")
    if not rest:
        return
    fwd, bwd = rest
    places, count = gradients_of(equation), len(equation.outputs)
    check_operands(equation, equation.operands, fwd)
    check_types(equation, fwd.output_types[:count], "fwd gives")
    if bwd.input_types != _backward_types(equation, fwd, places):
        raise InvalidTrace(
            f"custom_vjp: bwd takes {bwd.input_types}, not residuals, cotangents and closures"
        )
    for var, place in zip(equation.operands, places, strict=False):
        if place is not None and bwd.output_types[place] != var.type:
            raise InvalidTrace(
                f"custom_vjp: the gradient of {var} is {bwd.output_types[place]}, not {var.type}"
            )


def gradients_of(equation: Equation) -> Places:
    """Map each tensor of the arguments to its gradient."""
    return equation.literals["gradients"]


def call_of(equation: Equation) -> Any:
    """The call that a custom equation records."""
    return equation.literals["rule"]


def _backward_types(equation: Equation, fwd: Trace, places: Places) -> tuple[Type, ...]:
    cotangents = [var.type for var in equation.outputs if is_differentiable(var.type)]
    closures = equation.operand_types[len(places) :]
    return (*fwd.output_types[len(equation.outputs) :], *cotangents, *closures)


# ---- evaluate ----


@EVALUATE.rule("custom_vjp")
def custom_vjp_evaluate_rule(
    bodies: Sequence[Trace], *operands: Any, **options: Any
) -> tuple[Any, ...]:
    """Run the primal function, with the rule where autograd looks."""
    return calls.evaluate_custom(CUSTOM_VJP, bodies, operands, options)


# ---- jvp ----


@ACTIVE.rules.rule("custom_vjp")
def custom_vjp_activity_rule(equation: Equation, active: Mask) -> Mask:
    """Every differentiable output depends on every tensor of the arguments, unless the rule
    marks it as constant.
    """
    count, call = len(gradients_of(equation)), call_of(equation)
    calls.check_closures(equation, call, count, active)
    any_active = any(active[:count])
    constant = itertools.chain(call.constant, itertools.repeat(False))
    pairs = zip(equation.outputs, constant, strict=False)
    return tuple(any_active and is_differentiable(var.type) and not flag for var, flag in pairs)


@JVP.rule("custom_vjp")
def custom_vjp_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """The function's own forward derivative, or the jvp of the primal function; of an autograd
    function, which has to mean what its backward says, the transpose of the backward.
    """
    call = call_of(equation)
    if call.has_jvp:
        return capture_jvp(call, equation.operand_types, active)
    count = len(gradients_of(equation))
    calls.check_closures(equation, call, count, active)
    moving = tuple(flag and index < count for index, flag in enumerate(active))
    if call.ignores_closures:
        rule = transposed_twice(wrapped(CUSTOM_VJP, equation.kwargs, *equation.bodies), moving)
    else:
        rule = jvp_trace(equation.bodies[0], moving)
    return _with_all_tangents(rule, active, count, equation)


def _with_all_tangents(rule: JvpRule, active: Mask, count: int, equation: Equation) -> JvpRule:
    """The rule with an input for the tangents of closures, which are not used."""
    if not any(active[count:]):
        return rule
    builder = TraceBuilder(rule.trace.name)
    primals = builder.take(equation.operand_types)
    tangents = builder.take_some(equation.operand_types, active)
    used = [tangent for tangent in tangents[:count] if tangent is not None]
    return JvpRule(
        builder.build(inline_into(builder, rule.trace, (*primals, *used))), rule.active_outputs
    )


# ---- split ----


@VJP.rule("custom_vjp")
def custom_vjp_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """fwd and bwd. A residual that is an operand or an output is passed again, not kept twice."""
    call_of(equation).check_wanted(wanted_inputs, wanted_outputs, equation)
    calls.check_backward(call_of(equation), equation.source)
    equation = expanded(equation, wanted_inputs, wanted_outputs)
    _, fwd, bwd = equation.bodies
    places, count = gradients_of(equation), len(equation.outputs)
    kept = fwd.outputs[count:]
    inputs, outputs = list(fwd.inputs), list(fwd.outputs[:count])
    extras: list[Atom] = []
    residuals: list[Residual] = []
    for atom in kept:
        if atom in inputs:
            residuals.append(Residual("input", inputs.index(atom)))  # type: ignore[arg-type]
        elif atom in outputs:
            residuals.append(Residual("output", outputs.index(atom)))
        else:
            residuals.append(Residual("extra", len(extras)))
            extras.append(atom)
    residuals += [Residual("input", index) for index in range(len(places), len(equation.operands))]
    forward = cut(fwd, outputs=(*outputs, *extras))
    backward, found = _backward(equation, fwd, bwd, wanted_inputs, wanted_outputs)
    return Split(dce(forward), backward, tuple(residuals), found)


def _backward(
    equation: Equation, fwd: Trace, bwd: Trace, wanted_inputs: Mask, wanted_outputs: Mask
) -> tuple[Trace, Places]:
    """bwd on residuals, closures and the wanted cotangents, cut down to the wanted gradients."""
    places, count = gradients_of(equation), len(equation.outputs)
    builder = TraceBuilder(bwd.name)
    kept = builder.take(fwd.output_types[count:])
    closures = builder.take(equation.operand_types[len(places) :])
    given = builder.take_some(equation.output_types, wanted_outputs)
    cotangents = [
        zeros(builder, var.type) if value is None else value
        for var, value in zip(equation.outputs, given, strict=True)
        if isinstance(var.type, TensorType) and is_differentiable(var.type)
    ]
    results = inline_into(builder, bwd, (*kept, *cotangents, *closures))
    all_places = (*places, *(None for _ in closures))
    asked = chosen(all_places, wanted_inputs)
    gradients = tuple(results[place] for place in asked if place is not None)
    return dce(builder.build(gradients)), numbered(place is not None for place in asked)


def expanded(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Equation:
    """The equation with fwd and bwd, captured now if they were not with the call, or for another
    question.
    """
    call = call_of(equation)
    asked = call.asked(wanted_inputs, wanted_outputs) if call.asks else call
    if len(equation.bodies) == 3 and asked is call:
        return equation
    types = equation.operand_types
    fwd, bwd, places = capture_rule(asked, equation.bodies[0], types)
    kwargs = (("rule", Literal(call_of(equation))), ("gradients", Literal(places)))
    bodies = (equation.bodies[0], fwd, bwd)
    return replace(equation, kwargs=kwargs, bodies=bodies)


@memo(4096)
def sees_absent_cotangents(trace: Trace) -> bool:
    """Test whether some rule in the trace is told which of several outputs have no cotangent
    (`set_materialize_grads(False)`).
    """
    for equation in trace.equations:
        if equation.op == CUSTOM_VJP and "absent" in call_of(equation).asks:
            return True
        if any(map(sees_absent_cotangents, equation.bodies)):
            return True
    return False


# ---- vmap ----


@VMAP.rule("custom_vjp")
def custom_vjp_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """Batch all bodies. The gradient of an operand that all examples share is the sum of
    theirs.

    Every output is batched, also one that all examples share. Then each example has a cotangent of
    its own for each output, and what `bwd` makes of them may be summed. Bodies that are not there
    yet will be batched when they are.
    """
    if call_of(equation).has_vmap:
        types = equation.operand_types
        new, flags = capture_vmap(call_of(equation), types, batched, size, randomness)
        if len(flags) != len(equation.outputs):
            what = f"{call_of(equation).name}: its vmap returned {len(flags)} outputs, and forward"
            raise CustomRuleError(f"{what} returns {len(equation.outputs)}", source=equation.source)
        return new, flags
    primal, flags = batch(equation.bodies[0], batched, size, randomness)
    wanted = tuple(isinstance(var.type, TensorType) for var in equation.outputs)
    kwargs = equation.kwargs
    call = call_of(equation)
    if len(equation.bodies) == 3 and not call.has_jvp and not call.asks:
        rest = batched_rule(
            *equation.bodies[1:], gradients_of(equation), batched, wanted, size, randomness
        )
    else:
        types = equation.operand_types
        call = BatchedCall(call, equation.bodies[0], types, batched, wanted, size, randomness)
        kwargs, rest = (("rule", Literal(call)), ("gradients", Literal(gradients_of(equation)))), ()
    bodies = (batched_outputs(primal, flags, wanted, size), *rest)
    return wrapped(CUSTOM_VJP, kwargs, *bodies), wanted


DCE.enter(keep_all, "custom_vjp")


# ---- for users ----


class custom_vjp(calls.CustomFunction[P, R]):
    """A function whose backward is yours.

    Law: ``vjp(f)`` calls `fwd` and then `bwd`; everything else sees f. So forward mode and reverse
        mode disagree if `bwd` is not the derivative of f.

    Args:
        f: any PyTorch callable.
        nondiff_argnums: arguments that are static, such as numbers and functions. They come first
            in `bwd`.

    Then `f.defvjp(fwd, bwd)`. `fwd` takes what f takes and returns `(output, residuals)`, residuals
    being any pytree. `bwd(residuals, cotangent)` returns a tuple with the gradient of each
    argument, None standing for zero.

    Raises:
        CustomRuleError: f has no rule where one is needed, `fwd` or `bwd` returns something that
            does not fit f, or f closes over a tensor that is differentiated.

    Example:
        >>> from thunder_fn import grad
        >>> @custom_vjp
        ... def clipped(x):
        ...     return x * 1
        >>> clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (ct.clamp(-1, 1),))
        >>> grad(lambda x: (5 * clipped(x)).sum())(torch.zeros(2))
        tensor([1., 1.])

    Source: jax.custom_vjp.
    """

    asked_for = "defvjp(fwd, bwd)` before differentiating"

    @spelled(
        symbolic_zeros="Leave it out: cotangents that are zero are tensors of zeros.",
        optimize_remat="Leave it out: what a backward does not read is not kept.",
    )
    def defvjp(self, fwd: Callable[..., tuple[R, Any]], bwd: Callable[..., Any]) -> None:
        """Set the rule."""
        self._check_functions(fwd, bwd)
        self._check_takes(bwd, "the residuals", "the cotangent")
        self._rule = (fwd, bwd)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.called(VjpCall, bind_call, args, kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Test whether a body on a tensor depends on nothing but its type."""
    return all(isinstance(size, int) for size in tensor.shape) and tensor.is_contiguous()


@rules_in_context
def _bodies_of_types(
    call: Any, types: tuple[Type, ...], being_captured: tuple[Any, ...], flags: tuple[Any, ...]
) -> tuple[list[Captured], Places]:
    """Capture the bodies of a call of a function of this package, which reads nothing else."""
    return calls.inside_capture(lambda: _bodies(call, calls.examples_of(types)))


def _bodies(call: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[Captured], Places]:
    """Capture the function, then fwd and bwd unless that is being done. An error there is raised
    where a derivative asks for them.
    """
    captured = [call.captured("custom_vjp", tensors)]
    places: Places = (None,) * len(tensors)
    if call.has_rule and not calls.is_being_captured(call.function):
        with contextlib.suppress(CaptureError):
            fwd, bwd, places = capture_forward_and_backward(call, captured[0], tensors)
            captured += [fwd, bwd]
    return captured, places


def bind_call(recorder: Recorder, call: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Record a call of a function with its own backward; its result."""
    types, flags = tuple(map(type_of_value, tensors)), internals.flags()
    is_plain = not call.has_foreign and all(map(_is_plain, tensors)) and "autocast" not in flags
    captured, places = (
        _bodies_of_types(call, types, calls.being_captured(), tuple(flags.items()))
        if is_plain
        else _bodies(call, tensors)
    )
    options = {"rule": call.settled(), "gradients": places}
    return calls.bind_captured(recorder, CUSTOM_VJP, call, captured, tensors, **options)
