"""triton: fused cross entropy and RMSNorm, forward and backward, and derivatives of attention, as
operators of an executor.

On a GPU they run the kernels of `kernels.py` and `attention.py`; on CPU, or without triton, what
they mean in PyTorch.

Tested: everything on CPU, so the claims, the derivatives and the meaning of the operators, and the
kernels in Triton's interpreter. README says what has run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from thunder_fn.executors.triton import attention, kernels as kernels
from thunder_fn.extend import OperatorExecutor, get_grad, put_grads

EXECUTOR = OperatorExecutor("triton", numerics="reassociating")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _operator(name: str, like: Callable[..., Any], kernel: Callable[..., Any], first: int) -> Any:
    """An operator that runs a kernel where argument number `first` is on a GPU, and what it means
    elsewhere.
    """

    def run(*args: Any) -> Any:
        return (kernel if kernels.AVAILABLE and args[first].is_cuda else like)(*args)

    return EXECUTOR.register_operator(f"triton_{name}", like=like, fn=run)


# ---- cross entropy ----


def cross_entropy_like(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row in float32, zero where the label is ignored, and the row's logsumexp."""
    wide = logits.float()
    lse = wide.logsumexp(1)
    kept = labels != ignored
    picked = wide.gather(1, torch.where(kept, labels, 0)[:, None])[:, 0]
    return torch.where(kept, lse - picked, 0.0), lse


def cross_entropy_backward_like(
    grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, ignored: int
) -> torch.Tensor:
    """`(softmax - one_hot) * grad`, zero where the label is ignored."""
    kept = labels != ignored
    one_hot = F.one_hot(torch.where(kept, labels, 0), logits.shape[1])
    scale = torch.where(kept, grad.float(), 0.0)[:, None]
    return (((logits.float() - lse[:, None]).exp() - one_hot) * scale).to(logits.dtype)


cross_entropy = _operator("cross_entropy", cross_entropy_like, kernels.cross_entropy_forward, 0)
cross_entropy_backward = _operator(
    "cross_entropy_backward", cross_entropy_backward_like, kernels.cross_entropy_backward, 1
)


def _takes_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    shapes = logits.dim() == 2 and labels.dim() == 1 and 0 not in logits.shape
    return plain and shapes and logits.dtype in FLOATS and labels.dtype == torch.int64


def _reduced(
    loss: torch.Tensor, count: torch.Tensor, reduction: str, dtype: torch.dtype
) -> torch.Tensor:
    match reduction:
        case "mean":
            return (loss.sum() / count).to(dtype)
        case "sum":
            return loss.sum().to(dtype)
        case _:
            return loss.to(dtype)


def _cross_entropy_transform(
    logits: Any, labels: Any, ignore_index: int = -100, reduction: str = "mean", **_: Any
) -> Any:
    loss, _lse = cross_entropy(logits, labels, ignore_index)
    return _reduced(loss, (labels != ignore_index).sum(), reduction, logits.dtype)


def _cross_entropy_grad(
    logits: Any, labels: Any, ignore_index: int = -100, reduction: str = "mean", **_: Any
) -> Any:
    loss, lse = cross_entropy(logits, labels, ignore_index)
    count = (labels != ignore_index).sum()
    out = _reduced(loss, count, reduction, logits.dtype)
    g = get_grad(out).float()
    rows = (g / count if reduction == "mean" else g).expand(labels.shape[0])
    put_grads((logits,), (cross_entropy_backward(rows, logits, labels, lse, ignore_index),))
    return out


EXECUTOR.register_implementation(
    F.cross_entropy,
    checker=_takes_cross_entropy,
    execution_transform=_cross_entropy_transform,
    grad_transform=_cross_entropy_grad,
)


# ---- RMSNorm ----


def rms_norm_like(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over their root mean square, times the weight, and one over the root mean square, in
    float32.
    """
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(1) + eps)
    return (wide * rstd[:, None] * weight.float()).to(x.dtype), rstd


def rms_norm_backward_like(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> torch.Tensor:
    """The gradient of x."""
    wide, scaled, r = x.float(), grad.float() * weight.float(), rstd[:, None]
    return ((scaled - wide * ((scaled * wide).mean(1, keepdim=True) * r * r)) * r).to(x.dtype)


rms_norm = _operator("rms_norm", rms_norm_like, kernels.rms_norm_forward, 0)
rms_norm_backward = _operator(
    "rms_norm_backward", rms_norm_backward_like, kernels.rms_norm_backward, 1
)


def _takes_rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> bool:
    last = len(normalized_shape) == 1 and x.dim() >= 1 and normalized_shape[0] == x.shape[-1]
    same = weight is not None and weight.dtype == x.dtype
    return last and same and x.dtype in FLOATS and 0 not in x.shape


def _rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), columns)


def _eps(x: torch.Tensor, eps: float | None) -> float:
    return torch.finfo(x.dtype).eps if eps is None else eps


def _rms_norm_transform(
    x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    out, _rstd = rms_norm(_rows(x, x.shape[-1]), weight, _eps(x, eps))
    return out.reshape(x.shape)


def _rms_norm_grad(
    x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    rows = _rows(x, x.shape[-1])
    out, rstd = rms_norm(rows, weight, _eps(x, eps))
    result = out.reshape(x.shape)
    g = _rows(get_grad(result), x.shape[-1])
    of_weight = (g.float() * rows.float() * rstd[:, None]).sum(0).to(weight.dtype)
    put_grads((x, weight), (rms_norm_backward(g, rows, weight, rstd).reshape(x.shape), of_weight))
    return result


EXECUTOR.register_implementation(
    F.rms_norm,
    checker=_takes_rms_norm,
    execution_transform=_rms_norm_transform,
    grad_transform=_rms_norm_grad,
)


# ---- attention: tangents, gradients of tangents, and second derivatives ----


def _register_attention(name: str, first: int) -> None:
    """Claim an op of ours whose query is argument number `first`."""
    op, kernel = getattr(torch.ops.thunder_fn, name).default, getattr(attention, name)

    def like(*args: Any) -> Any:
        return op(*args)

    def takes(*args: Any) -> bool:
        query, value = args[first], args[first + 2]
        largest = max(query.shape[-1], value.shape[-1])
        return query.dtype in FLOATS and largest <= attention.LARGEST

    operator = _operator(name, like, kernel, first)
    EXECUTOR.register_implementation(op, operator, checker=takes)


_register_attention("attention_tangent", 0)
_register_attention("attention_pullback", 1)
_register_attention("attention_pullback_tangent", 1)
