"""Backwards of normalizations with the statistics computed anew, for derivatives of any order.

PyTorch's formulas read the mean and the scale that the forward saved, and count them as constants.
The second derivative is right, since its formula is written by hand. Derivatives of that are wrong
without a word, in eager PyTorch too. Here the statistics follow from the input. The forward's
epsilon, where it is not handed over, follows from the saved values.

Each function has its op's signature, behind `constant`, which gives a tensor that no derivative
goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Var, python_args

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

Tensor = torch.Tensor
Constant = Callable[[Tensor], Tensor]


def layer_norm_backward(
    constant: Constant,
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[Any],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of the input, the weight and the bias."""
    rows = x.dim() - len(normalized_shape)
    dims, others = tuple(range(rows, x.dim())), tuple(range(rows))
    wide = torch.promote_types(x.dtype, rstd.dtype)
    centred, variance = _moments(x.to(wide), dims)
    epsilon = constant(rstd.reshape(variance.shape) ** -2 - variance)
    results = _gradients(grad.to(wide), centred, (variance + epsilon).rsqrt(), weight, dims, others)
    return _wanted(results, (x, weight, bias if bias is not None else weight), output_mask)


def batch_norm_backward(
    constant: Constant,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of the input, the weight and the bias."""
    if not train:
        return NotImplemented  # nothing follows from the input
    dims = (0, *range(2, x.dim()))
    wide = torch.promote_types(x.dtype, torch.float32 if save_invstd is None else save_invstd.dtype)
    centred, variance = _moments(x.to(wide), dims)
    shape = [1, -1] + [1] * (x.dim() - 2)
    along = None if weight is None else weight.reshape(shape)
    results = _gradients(grad.to(wide), centred, (variance + eps).rsqrt(), along, dims, dims)
    of_x, of_weight, of_bias = results
    like = weight if weight is not None else save_mean if save_mean is not None else x
    return _wanted((of_x, of_weight.flatten(), of_bias.flatten()), (x, like, like), output_mask)


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(dims, keepdim=True)
    return centred, (centred * centred).mean(dims, keepdim=True)


def _gradients(
    grad: Tensor,
    centred: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    dims: tuple[int, ...],
    others: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """`dims` are normalized over, a weight's gradient is a sum over `others`."""
    normal = centred * scale
    pulled = grad if weight is None else grad * weight
    along = (pulled * normal).mean(dims, keepdim=True)
    of_x = scale * (pulled - pulled.mean(dims, keepdim=True) - normal * along)
    if not others:
        return of_x, grad * normal, grad
    return of_x, (grad * normal).sum(others), grad.sum(others)


def _wanted(
    results: Sequence[Tensor], likes: Sequence[Tensor | None], output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    return tuple(
        result.to(result.dtype if like is None else like.dtype) if flag else None
        for result, like, flag in zip(results, likes, output_mask, strict=True)
    )


STATISTICS: dict[str, Callable[..., Any]] = {
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
}
"""The functions by the name of the op."""


def with_own_statistics(
    recorder: Recorder, equation: Equation, read: Callable[[Var], Any]
) -> tuple[Any, ...] | None:
    """The backward of a normalization, which computes again what the forward saved; None if
    nothing depends on that.
    """

    def constant(value: torch.Tensor) -> torch.Tensor:
        var = recorder.var_of(value)
        assert var is not None, "a result of a recorded op is a tracer"
        (stopped,) = recorder.emit(ops.STOP_GRADIENT, (var,), (var.type,), ())
        tracer = recorder.tracer_of(stopped)
        assert tracer is not None, "of a tensor's type"
        return tracer

    args, _ = python_args(equation, read)
    result = STATISTICS[equation.op.name](constant, *args)
    return None if result is NotImplemented else ops.flatten_result(result)
