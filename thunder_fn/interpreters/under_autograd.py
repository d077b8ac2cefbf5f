"""Evaluating an equation where PyTorch's autograd or torch.func looks on: its rule is the
derivative.

Autograd would not find a custom rule by looking at the body. So the equation runs as one node whose
forward and backward are its split. If a derivative of that backward may be taken, some residuals
are computed again from the operands, with the same random numbers. These are the ones that no
operand and no output holds. So autograd sees where they come from.

Collectives run so, too: their backward sends by an equation, which an error can name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import drawing_from, generators_of, random_state
from thunder_fn.derived.activity import activity
from thunder_fn.derived.leaf_vjp import alone, is_differentiable
from thunder_fn.errors import UnsupportedCall
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.jvp import rule_of
from thunder_fn.interpreters.vmap import batch
from thunder_fn.ir import ops
from thunder_fn.ir.rules import Split, scattered
from thunder_fn.ir.trace import Equation, Literal, Op, Trace, Var, as_kwargs, type_of_value


def evaluate_followed(
    op: Op,
    bodies: tuple[Trace, ...],
    operands: Sequence[Any],
    options: dict[str, Any],
    plain: Callable[[], Any],
) -> tuple[Any, ...]:
    """Run an equation on values: as one node where a derivative may be taken, else plainly."""
    inputs = tuple(Var(index, type_of_value(value)) for index, value in enumerate(operands))
    outputs = tuple(
        Var(len(inputs) + index, type) for index, type in enumerate(bodies[0].output_types)
    )
    kwargs = as_kwargs(options)
    if torch.is_grad_enabled() and any(map(internals.is_legacy_batched, operands)):
        raise UnsupportedCall(
            f"{op.name}: `torch.autograd.grad(is_grads_batched=True, create_graph=True)` would lose"
            " its rule, since no node of autograd holds a batched gradient",
            source=None,
            fix="Ask for one gradient after the other, or use `tfn.vmap` of `tfn.vjp`.",
        )
    return tuple(follow(Equation(op, inputs, kwargs, outputs, bodies), operands, plain))


def follow(equation: Equation, operands: Sequence[Any], plain: Callable[[], Any]) -> Sequence[Any]:
    """Run an equation on the values of its operands: as one node where a derivative may be
    taken, else plainly.
    """
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    sends = ops.is_collective(equation.op) and any(map(internals.is_functorch_wrapped, tensors))
    is_inside = any(map(internals.is_legacy_batched, tensors))  # what autograd follows
    is_followed = internals.any_followed(tensors)
    if is_inside or not (sends or is_followed):
        return plain()
    single = alone(equation)
    flags = tuple(
        is_differentiable(var.type) and internals.is_followed(value)
        for var, value in zip(single.inputs, operands, strict=True)
    )
    reached = activity(single, flags)
    active = tuple(isinstance(atom, Var) and reached[atom.index] for atom in single.outputs)
    split = forward_backward(single, flags, active)
    is_pure = not ops.has_side_effect(equation)
    again = contextlib.nullcontext if is_pure else _same_random_numbers(tensors, single)
    node = _Sending if ops.is_collective(equation.op) else _Ruled
    results = node.apply(_Rule(equation, split, flags, active, again), *operands)  # type: ignore[no-untyped-call]
    return results[: len(single.outputs)]


def _same_random_numbers(
    tensors: Sequence[torch.Tensor], trace: Trace
) -> Callable[[], AbstractContextManager[None]]:
    """Contexts in which the generators of a trace and of tensors' devices are as they are now."""
    devices = tuple(
        dict.fromkeys(
            tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")
        )
    )
    note = lambda: random_state(generators_of(trace), devices)
    state = note()
    return lambda: drawing_from(state, note())


@dataclass(frozen=True, slots=True)
class _Rule:
    """An equation, its split, the operands that may have gradients, and the outputs that may
    have cotangents.
    """

    equation: Equation
    split: Split
    flags: tuple[bool, ...]
    active: tuple[bool, ...]
    again: Callable[[], AbstractContextManager[None]]

    @property
    def sees_absent(self) -> bool:
        """Test whether the rule tells a cotangent that is absent from zeros
        (`set_materialize_grads(False)`).
        """
        return any("absent" in getattr(value, "asks", ()) for value in self.literals)

    @property
    def is_of_values(self) -> bool:
        """Test for a rule whose residuals are what its `fwd` computes, as in JAX: of an output
        among them the derivative is that of `fwd`, not the rule's.
        """
        flags = (getattr(value, "ignores_closures", True) for value in self.literals)
        return self.equation.op.name == "custom_vjp" and not all(flags)

    @property
    def literals(self) -> list[Any]:
        """The values in the equation that are no tensors."""
        return [arg.value for _, arg in self.equation.kwargs if isinstance(arg, Literal)]

    @property
    def is_computed_again(self) -> bool:
        """Test whether a derivative of the backward takes residuals from the operands anew."""
        return self.split.num_extra > 0 or (self.is_of_values and bool(self.reads("output")))

    def reads(self, kind: str) -> set[int]:
        """The inputs, outputs and extra results that the backward reads."""
        return {one.index for one in self.split.residuals if one.kind == kind}


class _Ruled(torch.autograd.Function):
    """The node: extra residuals are further results, so that torch.func sees them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rule: _Rule, *operands: Any) -> Any:
        """A view that is made where gradients are off requires grad where its base does."""
        results = list(evaluate(rule.split.forward, operands))
        given = {id(value) for value in operands}
        for place, (value, flag) in enumerate(zip(results, rule.active, strict=False)):
            if not flag and isinstance(value, torch.Tensor) and value.requires_grad:
                results[place] = value.detach()
        return tuple(value.view_as(value) if id(value) in given else value for value in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rule, *operands = inputs
        count = len(ctx.rule.active)
        fixed = [value for value, flag in zip(output, ctx.rule.active, strict=False) if not flag]
        others = (value for value in (*fixed, *output[count:]) if isinstance(value, torch.Tensor))
        internals.mark_non_differentiable(ctx, others)
        ctx.set_materialize_grads(not ctx.rule.sees_absent)
        is_whole = ctx.rule.is_computed_again or ctx.rule.sees_absent
        given = range(len(operands)) if is_whole else ctx.rule.reads("input")
        results = {*ctx.rule.reads("output"), *range(count, len(output))}
        # and nothing else, since a collective writes to its result after this
        ctx.save_for_backward(
            *(value if position in given else None for position, value in enumerate(operands)),
            *(value if position in results else None for position, value in enumerate(output)),
        )
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        rule: _Rule = ctx.rule
        operands = ctx.saved_tensors[: len(rule.flags)]
        results = ctx.saved_tensors[len(rule.flags) :]
        split, active = rule.split, rule.active
        absent = any(value is None for value, flag in zip(cotangents, active, strict=False) if flag)
        if absent:
            active = tuple(
                flag and value is not None for value, flag in zip(cotangents, active, strict=False)
            )
            split = forward_backward(alone(rule.equation), rule.flags, active)
        if absent or (torch.is_grad_enabled() and rule.is_computed_again):
            with rule.again():
                again = evaluate(split.forward, operands)
            count = 0 if torch.is_grad_enabled() and rule.is_of_values else len(active)
            results = (*results[:count], *again[count:])
        given = [value for value, flag in zip(cotangents, active, strict=False) if flag]
        found = evaluate(split.backward, (*split.residual_values(operands, results), *given))
        return (None, *split.gradients_in(found, rule.flags))

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rule: _Rule = ctx.rule
        operands = ctx.saved_tensors[: len(rule.flags)]
        found = rule_of(rule.equation, rule.flags)
        pairs = zip(operands, given[1:], rule.flags, strict=True)
        tangents = [
            torch.zeros_like(x) if tangent is None else tangent
            for x, tangent, flag in pairs
            if flag
        ]
        with rule.again():
            results = evaluate(found.trace, (*operands, *tangents))
        own = scattered(results[len(rule.active) :], found.active_outputs)
        return (*own, *(None for _ in range(rule.split.num_extra)))


class _Sending(_Ruled):
    """The node of a collective. functorch would send each example's alone, and not wait for what
    comes.
    """

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: _Rule, *operands: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send those of all examples together, by our batching rule."""
        pairs = list(zip(operands, in_dims[1:], strict=True))
        trace, flags = batch(
            rule.split.forward, tuple(dim is not None for _, dim in pairs), info.batch_size
        )
        given = [value if dim is None else value.movedim(dim, 0) for value, dim in pairs]
        return tuple(evaluate(trace, given)), tuple(0 if flag else None for flag in flags)
