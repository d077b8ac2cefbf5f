"""Triton kernels of cross entropy and RMSNorm, forward and backward. One program for each row.

A row is read in blocks, so that any number of columns fits; sums are in float32. The module imports
without triton; `AVAILABLE` says whether the kernels can run. They have run in Triton's interpreter
and on an H100.

Source: the running maximum and sum is that of M. Milakov and N. Gimelshein, "Online normalizer
calculation for softmax", 2018.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


triton, tl = _imported("triton"), _imported("triton.language")
AVAILABLE = triton is not None and torch.cuda.is_available()
BLOCK = 1024


def kernel(function: Any) -> Any:
    """The kernel; where there is no triton, a function that nobody calls."""
    return function if triton is None else triton.jit(function)


def launched(run: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument, which need not be the current one."""
    with torch.cuda.device_of(arguments[0]):
        run[grid](*arguments, **constants)


@kernel
def _cross_entropy_forward_kernel(logits, labels, loss, lse, stride, columns, ignored, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")).to(
            tl.float32
        )
        new_top = tl.maximum(top, tl.max(x, axis=0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # a block of nothing but -inf
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), axis=0)
        top = new_top
    result = top + tl.log(total)
    label = tl.load(labels + row)
    kept = label != ignored
    picked = tl.load(logits + row * stride + label, mask=kept, other=0.0).to(tl.float32)
    tl.store(lse + row, result)
    tl.store(loss + row, tl.where(kept, result - picked, 0.0))


@kernel
def _cross_entropy_backward_kernel(grad, logits, labels, lse, out, stride, columns, ignored, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    scale = tl.where(label != ignored, tl.load(grad + row).to(tl.float32), 0.0)
    total = tl.load(lse + row)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")).to(
            tl.float32
        )
        value = (tl.exp(x - total) - tl.where(at == label, 1.0, 0.0)) * scale
        tl.store(out + row * columns + at, value.to(out.dtype.element_ty), mask=at < columns)


@kernel
def _rms_norm_forward_kernel(x, weight, out, rstd, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(rstd + row, scale)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(
            out + row * columns + at,
            (value * scale * w).to(out.dtype.element_ty),
            mask=at < columns,
        )


@kernel
def _rms_norm_backward_kernel(grad, x, weight, rstd, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(rstd + row)
    dots = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        dots += g * w * value
    mean = tl.sum(dots, axis=0) * scale * scale / columns
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        result = (g * w - value * mean) * scale
        tl.store(out + row * columns + at, result.to(out.dtype.element_ty), mask=inside)


def cross_entropy_forward(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and the logarithm of the sum of its exponentials."""
    logits, (rows, columns) = logits.contiguous(), logits.shape
    loss, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    arguments = (logits, labels.contiguous(), loss, lse, columns, columns, ignored)
    launched(_cross_entropy_forward_kernel, (rows,), *arguments, BLOCK=BLOCK)
    return loss, lse


def cross_entropy_backward(
    grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, ignored: int
) -> torch.Tensor:
    """The gradient of the logits, given one for each row's loss."""
    logits, (rows, columns), out = (
        logits.contiguous(),
        logits.shape,
        torch.empty_like(logits.contiguous()),
    )
    arguments = (
        grad.contiguous(),
        logits,
        labels.contiguous(),
        lse,
        out,
        columns,
        columns,
        ignored,
    )
    launched(_cross_entropy_backward_kernel, (rows,), *arguments, BLOCK=BLOCK)
    return out


def rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows times the weight, and one over each row's root mean square."""
    x, (rows, columns) = x.contiguous(), x.shape
    out, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    arguments = (x, weight.contiguous(), out, rstd, columns, eps)
    launched(_rms_norm_forward_kernel, (rows,), *arguments, BLOCK=BLOCK)
    return out, rstd


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> torch.Tensor:
    """The gradient of x. The weight's gradient is a matrix product's work, and is left to
    PyTorch.
    """
    x, (rows, columns), out = x.contiguous(), x.shape, torch.empty_like(x.contiguous())
    arguments = (grad.contiguous(), x, weight.contiguous(), rstd, out, columns)
    launched(_rms_norm_backward_kernel, (rows,), *arguments, BLOCK=BLOCK)
    return out
