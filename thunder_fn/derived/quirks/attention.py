"""Attention of every order, whatever kernel PyTorch chose for it.

The kernels (flash, efficient, cuDNN, and the one for CPUs) come in pairs, a forward and a backward.
PyTorch differentiates neither the backward nor, in forward mode, either. Here a first derivative in
reverse mode is PyTorch's own pair. Tangents and second derivatives are ops of ours, with memory
linear in the length (`attention_orders.py`). All others, and those of masks, follow from the
definition, softmax(q k' + mask) v, written with plain ops. Values stay those of the kernels, and a
second derivative is computed when it is asked for.

A traced forward is always asked for the log-sum-exp, which its backward reads (`RecordingMode`).
PyTorch leaves it out if no argument requires grad; a backward that reads it then gives wrong
numbers (cuDNN) or fails (efficient). A program in which nothing reads it leaves it out again
(`executors/pruning.py`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from thunder_fn.derived.quirks import attention_orders as orders
from thunder_fn.ir.trace import Equation, Literal
from thunder_fn.torch_internals import OpOverload, named_arguments, schema_of

_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FORWARDS = frozenset(f"aten._scaled_dot_product_{kernel}.default" for kernel in _KERNELS)
BACKWARDS = frozenset(f"aten._scaled_dot_product_{kernel}_backward.default" for kernel in _KERNELS)
KERNELS = FORWARDS | BACKWARDS
"""The names of PyTorch's ops."""
ALL = KERNELS | orders.FORMULAS.keys()
PUSHED = KERNELS | {str(orders.PULLBACK)}
"""The names of all ops of attention, and of those whose tangents are ops of ours."""

OPTIONAL_LOG_SUMS = frozenset(
    f"aten._scaled_dot_product_{kernel}.default" for kernel in _KERNELS[1:3]
)
"""The forwards that give the log-sum-exp if their fifth argument asks for it."""

OF_ALL_EXAMPLES = frozenset(
    (
        "philox_seed",
        "philox_offset",
        "rng_state",
        "unused",
        "debug_attn_mask",
        "cum_seq_q",
        "cum_seq_k",
    )
)
"""Arguments and results of the ops that have no batch dim."""


def without_log_sums(equation: Equation, read: Container[int]) -> Equation:
    """The equation, not asking for a log-sum-exp that is not among the variables that are read."""
    if equation.op.name not in OPTIONAL_LOG_SUMS or equation.outputs[1].index in read:
        return equation
    return replace(equation, args=(*equation.args[:4], Literal(False), *equation.args[5:]))


def meaning(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a kernel, or of an op of ours, by ops that have all derivatives; None for
    results that no derivative goes through.

    NotImplemented with dropout: the numbers that a kernel draws stay inside of it.
    """
    given = named_arguments(op, args, kwargs)
    if given.get("dropout_p", 0.0):
        return NotImplemented
    of, count = orders.of_arguments(given), len(schema_of(op).returns)
    if str(op) in orders.FORMULAS:
        return orders.at_once(orders.FORMULAS[str(op)], of)
    if of.grad is None:
        return *orders.at_once(orders.result, of), *(None,) * (count - 1)
    settings = of.mask, of.is_causal, of.scale
    gradients = orders.PULLBACK(of.grad, of.query, of.key, of.value, *settings)
    if count == 3:
        return gradients
    wanted = given["grad_input_mask"]
    results = *gradients, orders.gradient_of_mask(of) if wanted[3] else None
    return tuple(one if flag else None for one, flag in zip(results, wanted, strict=True))


def tangents(
    op: OpOverload, given: Mapping[str, Any], pushed: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """The tangents of an op's first results, by ops of ours; None where these do not compute
    them.

    Args:
        op: a kernel, or the pullback.
        given: the arguments by the names in the schema.
        pushed: the tangents of arguments, likewise.
    """
    mask_is_pushed = not {"attn_mask", "attn_bias"}.isdisjoint(pushed)
    if given.get("dropout_p", 0.0) or mask_is_pushed or any(given.get("grad_input_mask", ())[3:]):
        return None
    of = orders.of_arguments(given)
    moved = [pushed.get(name) for name in ("query", "key", "value")]
    arguments, settings = (of.query, of.key, of.value, of.mask), (of.is_causal, of.scale)
    if of.grad is None:
        return (orders.TANGENT(*arguments, *moved, *settings),)
    grad = pushed.get("grad_out", pushed.get("grad_out_"))
    return orders.PULLBACK_TANGENT(of.grad, *arguments, grad, *moved, *settings)
