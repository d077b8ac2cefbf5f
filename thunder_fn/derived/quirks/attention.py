"""Attention of every order, whatever kernel PyTorch chose for it.

The kernels (flash, efficient, cuDNN, and the one for CPUs) come in pairs, a forward and a backward.
PyTorch differentiates neither the backward nor, in forward mode, either. Here a first derivative in
reverse mode is PyTorch's own pair. All others follow from the definition, softmax(q k' + mask) v,
written with plain ops on queries, keys and values. Values stay those of the kernels, and a second
derivative is computed when it is asked for.

A traced forward is always asked for the log-sum-exp, which its backward reads (`RecordingMode`).
PyTorch leaves it out if no argument requires grad; a backward that reads it then gives wrong
numbers (cuDNN) or fails (efficient). A program in which nothing reads it leaves it out again
(`executors/pruning.py`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.ir.trace import Equation, Literal
from thunder_fn.torch_internals import OpOverload, schema_of

Tensor = torch.Tensor

_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FORWARDS = frozenset(f"aten._scaled_dot_product_{kernel}.default" for kernel in _KERNELS)
BACKWARDS = frozenset(f"aten._scaled_dot_product_{kernel}_backward.default" for kernel in _KERNELS)
KERNELS = FORWARDS | BACKWARDS
"""The names of the ops."""

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


def named_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names in the op's schema."""
    return {
        **{
            argument.name: arg for argument, arg in zip(schema_of(op).arguments, args, strict=False)
        },
        **kwargs,
    }


def meaning(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a kernel with plain ops; None for results that no derivative goes through.

    NotImplemented with dropout: the numbers that a kernel draws stay inside of it.
    """
    given = named_arguments(op, args, kwargs)
    if given.get("dropout_p", 0.0):
        return NotImplemented
    query, key, value = given["query"], given["key"], given["value"]
    mask = given.get("attn_bias") if "attn_bias" in given else given.get("attn_mask")
    settings = mask, given.get("is_causal", False), given.get("scale")
    count = len(schema_of(op).returns)
    grad = given.get("grad_out", given.get("grad_out_"))
    if grad is None:
        return attention(query, key, value, *settings), *(None,) * (count - 1)
    *gradients, of_mask = attention_backward(grad, query, key, value, *settings)
    if count == 3:
        return tuple(gradients)
    wanted = given["grad_input_mask"]
    results = (*gradients, of_mask)
    return tuple(result if flag else None for result, flag in zip(results, wanted, strict=True))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Softmax attention. Halves are computed with in float32, as kernels and PyTorch's own
    definition do.
    """
    weights, _ = _weights(query, key, mask, is_causal, scale)
    return (weights @ _of_each_head(_wide(value), query)).to(query.dtype)


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of the queries, keys, values and mask, from these alone so that they can be
    differentiated.
    """
    weights, factor = _weights(query, key, mask, is_causal, scale)
    wide = _wide(grad)
    of_weights = wide @ _of_each_head(_wide(value), query).transpose(-2, -1)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query = of_scores @ _of_each_head(_wide(key), query) * factor
    of_key = _of_shared_heads(of_scores.transpose(-2, -1) @ _wide(query) * factor, key)
    of_value = _of_shared_heads(weights.transpose(-2, -1) @ wide, value)
    of_mask = None if mask is None else of_scores.sum_to_size(mask.shape).to(mask.dtype)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_mask


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, float]:
    """The weight of each value for each query, and the scale. If a mask hides all keys from a
    query, its weights are zero.
    """
    factor: Any = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _wide(query) @ _of_each_head(_wide(key), query).transpose(-2, -1) * factor
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if mask is None:
        return scores.softmax(-1), factor
    scores = (
        scores.masked_fill(~mask, float("-inf"))
        if mask.dtype is torch.bool
        else scores + _wide(mask)
    )
    alone = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0), factor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, one for each head of the queries. If there are fewer, neighbours share
    one.
    """
    heads, own = query.shape[-3], x.shape[-3]
    return x if own == heads else x.repeat_interleave(heads // own, -3)


def _of_shared_heads(grad: Tensor, x: Tensor) -> Tensor:
    own = x.shape[-3]
    return (
        grad if grad.shape[-3] == own else grad.unflatten(-3, (own, grad.shape[-3] // own)).sum(-3)
    )
