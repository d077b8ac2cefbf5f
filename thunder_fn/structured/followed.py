"""Evaluating a structured equation where PyTorch's autograd or torch.func looks on: its rule is the derivative.

A custom rule is not what autograd would find by looking at the body, so the equation runs as one node whose forward and
backward are its split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.derive import is_differentiable
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.rules import Split, rules_of
from thunder_fn.trace import Equation, Literal, Op, Trace, Var, type_of_value


def evaluate_followed(
    op: Op, bodies: tuple[Trace, ...], operands: Sequence[Any], options: dict[str, Any], plain: Callable[[], Any]
) -> tuple[Any, ...]:
    """Run an equation on values: as one node where a derivative may be taken, else plainly."""
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(map(internals.is_followed, tensors)):
        return plain()
    inputs = tuple(Var(index, type_of_value(value)) for index, value in enumerate(operands))
    types = bodies[0].output_types
    outputs = tuple(Var(len(inputs) + index, type) for index, type in enumerate(types))
    kwargs = tuple((key, Literal(value)) for key, value in options.items())
    equation = Equation(op, inputs, kwargs, outputs, bodies)
    flags = tuple(is_differentiable(var.type) for var in inputs)
    active = rules_of(equation).activity(equation, flags)
    split = rules_of(equation).split(equation, flags, active)
    results = _Ruled.apply(split, active, flags, *operands)
    return tuple(results[: len(outputs)])


class _Ruled(torch.autograd.Function):
    """The node: residuals are further results, so that torch.func sees them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(split: Split, active: tuple[bool, ...], flags: tuple[bool, ...], *operands: Any) -> Any:
        return evaluate(split.forward, operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        split, ctx.active, ctx.flags, *operands = inputs
        ctx.split, ctx.count = split, len(operands)
        kept = output[len(ctx.active) :]
        constant = [value for value, flag in zip(output, ctx.active, strict=False) if not flag]
        ctx.mark_non_differentiable(*(value for value in (*constant, *kept) if isinstance(value, torch.Tensor)))
        ctx.save_for_backward(*split.residual_values(operands, output))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        given = [value for value, flag in zip(cotangents, ctx.active, strict=False) if flag]
        found = evaluate(ctx.split.backward, (*ctx.saved_tensors, *given))
        places = iter(ctx.split.gradients)
        taken = [next(places) if flag else None for flag in ctx.flags]
        return (None, None, None, *(None if place is None else found[place] for place in taken))
