"""The rules of custom_vjp functions: how a call's fwd and bwd become bodies, and how bodies
become batched ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from thunder_fn.capture import TENSOR, Captured, current, pytree
from thunder_fn.capture.rewriting import rules_in_context
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.errors import CustomRuleError, InvalidTrace, kind_of
from thunder_fn.interpreters.vmap import batch, batched_outputs, batched_types, expand
from thunder_fn.ir import ops
from thunder_fn.ir.rules import JvpRule, Mask, chosen, numbered
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    type_of_value,
)
from thunder_fn.ir.walking import begun_with, inline_into
from thunder_fn.structured.shared import custom_calls as calls
from thunder_fn.structured.shared.custom_calls import Call
from thunder_fn.structured.shared.side_effects import reads_of, without_side_effects

Places: TypeAlias = tuple[int | None, ...]
"""The gradient of each tensor of the arguments, by number; None for zero."""


# ---- capture ----


@rules_in_context
def capture_rule(call: Any, primal: Trace, types: tuple[Type, ...]) -> tuple[Trace, Trace, Places]:
    """Capture fwd and bwd for operands of these types; what they close over become constants."""
    if hasattr(call, "capture"):  # not captured yet, or an executor's
        return call.capture()
    count = sum(call.is_tensor)

    def run() -> Any:
        examples = calls.examples_of(types[:count])
        captured = call.captured("custom_vjp", examples)
        fwd, bwd, places = capture_forward_and_backward(call, captured, examples)
        return fwd.trace, bwd.trace, places

    fwd, bwd, places = calls.inside_capture(run, call.begun)
    fwd, bwd = (
        calls.with_inputs(trace, (*trace.input_types, *types[count:])) for trace in (fwd, bwd)
    )
    return fwd, bwd, places


def capture_forward_and_backward(
    call: Any, primal: Captured, tensors: Sequence[Any]
) -> tuple[Captured, Captured, Places]:
    """Capture fwd on the tensors, and bwd on tracers of its residuals and of the cotangents."""
    found: list[tuple[Places, Any]] = []

    def capture(_: Sequence[int]) -> tuple[Captured, Captured]:
        fwd, bwd, places, reads = _capture_forward_and_backward(call, primal, tensors)
        found.append((places, reads))
        return fwd, bwd

    with calls.capturing_rule_of(call.function):
        if not call.has_foreign:
            return *capture(()), found[0][0]
        fwd, bwd = without_side_effects(
            "custom_vjp", call.rules, capture, is_rule=True, given=call.reached
        )
    places, call.read_later[:] = found[0]
    return fwd, bwd, places


def _capture_forward_and_backward(
    call: Any, primal: Captured, tensors: Sequence[Any]
) -> tuple[Captured, Captured, Places, list[Any]]:
    run = call.start()
    fwd = calls.captured_body("custom_vjp", run.fwd, tensors)
    run.check_forward(primal, fwd)
    count = primal.num_results
    kept, types = fwd.trace.output_types[count:], primal.trace.output_types
    cotangents = [type for type in types if is_differentiable(type)]
    places: list[int | None] = []

    def bwd(*values: Any) -> Any:
        found = run.bwd(primal, fwd, values[: len(kept)], values[len(kept) :])
        places[:] = numbered(gradient is not None for gradient in found)
        return tuple(gradient for gradient in found if gradient is not None)

    bwd.__name__ = call.backward_name
    examples = calls.examples_of((*kept, *cotangents))
    recorder = current()
    if recorder is not None and kept and len(examples) == len(kept) + len(cotangents):
        recorder.values.give_results(examples[: len(kept)], fwd.trace, tensors)
    with reads_of(call.rules[-1], call.reached) as reads:
        captured = calls.captured_body("custom_vjp", bwd, examples)
    return fwd, captured, tuple(places), reads


# ---- batching ----


@rules_in_context
def capture_vmap(
    call: Any, types: tuple[Type, ...], batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """Capture a function's own batching rule; what it closes over become constants."""
    count = sum(call.is_tensor)
    wide = batched_types(types, batched, size)
    dims: list[int | None] = []

    def rule(*tensors: Any) -> Any:
        result = call.vmap(size, randomness, batched[:count], tensors)
        if not isinstance(result, tuple) or len(result) != 2:
            what = f"{call.name}: Expected its vmap to have two returns, (outputs, out_dims)"
            raise CustomRuleError(f"{what}; it returned {kind_of(result)}")
        outputs, out_dims = result
        values = pytree.as_tuple(outputs)
        dims[:] = out_dims if isinstance(out_dims, tuple) else (out_dims,) * len(values)
        is_one = isinstance(out_dims, tuple) and not isinstance(outputs, tuple)
        if is_one or len(dims) != len(values):
            counts = f"{len(values)} outputs and {len(dims)} out_dims"
            found = "a tuple of out_dims for a single output" if is_one else counts
            what = f"{call.name}: its vmap returned an incompatible (out_dims, output) pair"
            raise CustomRuleError(f"{what}: {found}")
        return tuple(
            value if dim is None else value.movedim(dim, 0)
            for value, dim in zip(values, dims, strict=True)
        )

    rule.__name__ = f"{call.name}_vmap"
    captured = calls.inside_capture(
        lambda: calls.captured_body("custom_vjp", rule, calls.examples_of(wide[:count])), call.begun
    )
    return calls.with_inputs(captured.trace, wide), tuple(dim is not None for dim in dims)


@rules_in_context
def capture_jvp(call: Any, types: tuple[Type, ...], active: Mask) -> JvpRule:
    """Capture a function's own forward derivative; what it closes over become constants."""
    if isinstance(call, BatchedCall):
        return call.capture_jvp(active)
    count = sum(call.is_tensor)
    moving = [index for index, flag in enumerate(active) if flag]
    moved: list[bool] = []

    def rule(*values: Any) -> Any:
        tangents = dict(
            zip((index for index in moving if index < count), values[count:], strict=True)
        )
        outputs, found = call.push(values[:count], [tangents.get(index) for index in range(count)])
        moved[:] = [
            tangent is not None and is_differentiable(type_of_value(tangent)) for tangent in found
        ]
        return (*outputs, *chosen(found, moved))

    rule.__name__ = f"{call.name}_jvp"
    wanted = (*types[:count], *(types[index] for index in moving if index < count))
    captured = calls.inside_capture(
        lambda: calls.captured_body("custom_vjp", rule, calls.examples_of(wanted)), call.begun
    )
    builder = TraceBuilder(captured.trace.name)
    primals, tangents = builder.take(types), builder.take(types[index] for index in moving)
    used = chosen(tangents, [index < count for index in moving])
    results = inline_into(builder, captured.trace, (*primals[:count], *used))
    return JvpRule(builder.build(results), tuple(moved))


class BatchedCall(calls.BatchedRule):
    """A call in a batch whose rule has not been captured yet; its rule is that of one example, in
    batches.
    """

    has_jvp: Any = property(attrgetter("call.has_jvp"))
    ignores_closures: Any = property(attrgetter("call.ignores_closures"))
    constant: Any = property(attrgetter("call.constant"))
    asks: Any = property(attrgetter("call.asks"))
    begun: Any = property(attrgetter("call.begun"))
    read_later: Any = property(attrgetter("call.read_later"))
    is_run_later: Any = property(attrgetter("call.is_run_later"))

    def asked(self, wanted_inputs: Mask, wanted_outputs: Mask) -> BatchedCall:
        """The batch of the call whose rule answers this question."""
        call = self.call.asked(wanted_inputs, wanted_outputs)
        return self if call is self.call else replace(self, call=call)

    def capture_jvp(self, active: Mask) -> JvpRule:
        """The forward derivative of the call of one example, in batches."""
        one = capture_jvp(self.call, self.types, active)
        tangents = chosen(self.batched, active)
        trace, own = batch(one.trace, (*self.batched, *tangents), self.size, self.randomness)
        moved = chosen(self.outputs, one.active_outputs)
        return JvpRule(
            batched_outputs(trace, own, (*self.outputs, *moved), self.size), one.active_outputs
        )

    def check_wanted(self, inputs: Mask, outputs: Mask, equation: Equation) -> None:
        """Check as for the call of one example."""
        self.call.check_wanted(inputs, outputs, equation)

    def capture(self) -> tuple[Trace, Trace, Places]:
        """The rule of the call of one example, in batches."""
        fwd, bwd, places = capture_rule(self.call, self.primal, self.types)
        rule = batched_rule(
            fwd, bwd, places, self.batched, self.outputs, self.size, self.randomness
        )
        return (*rule, places)


def batched_rule(
    fwd: Trace, bwd: Trace, places: Places, batched: Mask, outputs: Mask, size: Dim, randomness: str
) -> tuple[Trace, Trace]:
    """The forward and the backward of a rule on batches; gradients of unbatched inputs are
    summed over the batch.
    """
    # Before: fwd: operands -> outputs, residuals
    #         bwd: residuals, cotangents, operands without place -> gradients, by `places`
    # After:  the same, in batches; a gradient is batched where its operand is
    differentiable = [is_differentiable(type) for type in fwd.output_types[: len(outputs)]]
    fwd, flags = batch(fwd, batched, size, randomness)
    kept = flags[len(outputs) :]
    cotangents = chosen(outputs, differentiable)
    bwd, found = batch(bwd, (*kept, *cotangents, *batched[len(places) :]), size, randomness)
    owners = {
        place: flag for place, flag in zip(places, batched, strict=False) if place is not None
    }
    bwd = _gradients_for(bwd, found, [owners[index] for index in range(len(bwd.outputs))], size)
    return batched_outputs(fwd, flags, outputs, size), bwd


def _gradients_for(trace: Trace, own: Mask, wanted: Sequence[bool], size: Dim) -> Trace:
    builder, results = begun_with(trace)
    outputs: list[Atom] = []
    for value, have, want in zip(results, own, wanted, strict=True):
        wide = value if have else expand(builder, value, size)
        outputs.append(wide if want else _summed(builder, wide))
    return builder.build(tuple(outputs))


def _summed(builder: TraceBuilder, value: Atom) -> Var:
    if not isinstance(value, Var) or not isinstance(value.type, TensorType):
        raise InvalidTrace("only tensors are batched")
    type = TensorType(value.type.dtype, value.type.shape[1:], value.type.device)
    return ops.emit(builder, torch.ops.aten.sum.dim_IntList, (value, (0,)), type)


# ---- calls ----


class VjpCall(Call):
    """A call of a `custom_vjp` function, and the use of its rule."""

    @property
    def has_rule(self) -> bool:
        """Test whether the function has a rule."""
        return self.function.has_rule

    @property
    def backward_name(self) -> str:
        """The name of bwd in traces."""
        return f"{self.name}_bwd"

    def start(self) -> VjpCall:
        """Return the call that runs the rule once."""
        return self

    def fwd(self, *tensors: Any) -> Any:
        """The user's fwd."""
        return self.function.rule[0](*self.args(tensors))

    def check_forward(self, primal: Captured, fwd: Captured) -> None:
        """Raise unless fwd returned the function's result, and residuals."""
        where = f"custom_vjp: fwd of {self.name}"
        result = fwd.result(fwd.trace.output_types)
        calls.pair_of(result, "(output, residuals)", where)
        calls.check_same_result(primal, fwd, where)

    def bwd(
        self, primal: Captured, fwd: Captured, kept: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """One gradient or None for each tensor of the arguments, from the user's bwd."""
        leaves = pytree.filled(fwd.out_leaves[primal.out_spec.num_leaves :], kept)
        residuals = pytree.unflatten(fwd.out_spec.children()[1], leaves)
        found = self.function.rule[1](
            *self.static_args, residuals, cotangent_tree(primal, cotangents)
        )
        return self.gradients(primal, found)

    def gradients(self, primal: Captured, found: Any) -> list[Any]:
        """Check the results of bwd: one gradient or None for each tensor."""
        where = f"custom_vjp: bwd of {self.name}"
        arguments = self.tree([TENSOR] * sum(self.is_tensor))
        if not isinstance(found, (tuple, list)) or len(found) != len(arguments):
            raise CustomRuleError(
                f"{where} must return a tuple with one gradient for each argument, {len(arguments)}"
                f" of them, but it returned {calls.described(found)}"
            )
        return [
            value if value is None else calls.check_gradient(value, type, path, where)
            for value, type, path in self.typed_leaves(
                found, arguments, primal.trace.input_types, where
            )
        ]


def cotangent_tree(primal: Captured, cotangents: Sequence[Any]) -> Any:
    """Cotangents in the structure of the output; None where there is none."""
    supply, types = iter(cotangents), iter(primal.trace.output_types)
    leaves = [
        next(supply) if leaf is TENSOR and is_differentiable(next(types)) else None
        for leaf in primal.out_leaves
    ]
    return pytree.unflatten(primal.out_spec, leaves)
