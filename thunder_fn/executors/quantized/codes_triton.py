"""The Triton of the executor codes: products with codes, and codes as floats, in one launch each.

A program multiplies a block of rows of activations with a block of rows of codes, which it decodes
in registers. One row is a sum of products; more rows are blocks of a matrix product, for tensor
cores. If two codes lie in a byte, the even columns of the activations are multiplied with the one
half and the odd columns with the other. Sums are in float32; scales of rows are applied to them.

Tested: in Triton's interpreter, and compiled for sm_90, both on a simulated GPU. No GPU has run it.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.triton.kernels import AVAILABLE as AVAILABLE, kernel, launched, tl
from thunder_fn.interpreters.quantize.four_bits import NF4_BLOCK
from thunder_fn.interpreters.quantize.scheme import Bias, plus

INT8, FP8, INT4, NF4 = range(4)
"""The codecs, as kernels know them."""
CODECS = {"int8": INT8, "fp8": FP8, "int4": INT4, "nf4": NF4}
OUTER = 256
"""So many blocks of nf4 share a step of their scales."""

Members = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]
"""Codes, scales, steps, mean and table (or anything), codes in a row, and a group's columns."""


@kernel
def _looked_up(codes, table, scales, steps, mean, place, within):  # type: ignore[no-untyped-def]
    block = place // 64
    size = tl.load(scales + block, mask=within, other=0).to(tl.float32)
    size = size * tl.load(steps + block // 256, mask=within, other=0.0) + tl.load(mean)
    return tl.load(table + codes.to(tl.int32)) * size


@kernel
def _in_steps(codes, scales, group, rows, row, within):  # type: ignore[no-untyped-def]
    at = (group * rows + row) * 2
    step = tl.load(scales + at, mask=within, other=0.0).to(tl.float32)
    zero = tl.load(scales + at + 1, mask=within, other=0.0).to(tl.float32)
    return (codes.to(tl.float32) - 8.0) * step + zero


@kernel
def _decoded(values, scales, steps, mean, table, row, byte, rows, width, group, CODEC: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    """The floats of the bytes at `byte` in `row`: of the first codes in them, and of the second."""
    within = (row < rows) & (byte < width)
    place = row.to(tl.int64) * width + byte
    codes = tl.load(values + place, mask=within, other=0)
    if CODEC == 0:
        first = codes.to(tl.float32)
        second = first
    elif CODEC == 1:  # the bits of e4m3, in their places in a float32
        bits = (codes.to(tl.int32) << 20) & -2013265921
        first = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        second = first
    elif CODEC == 2:
        first = _in_steps(codes & 15, scales, byte * 2 // group, rows, row, within)
        second = _in_steps(codes >> 4, scales, (byte * 2 + 1) // group, rows, row, within)
    else:
        first = _looked_up(codes >> 4, table, scales, steps, mean, place * 2, within)
        second = _looked_up(codes & 15, table, scales, steps, mean, place * 2 + 1, within)
    return tl.where(within, first, 0.0), tl.where(within, second, 0.0)


@kernel
def _as(weights, like):  # type: ignore[no-untyped-def]
    """Decoded weights in a dtype. The greatest may be a little too great for float16. NaN stays."""
    if like.dtype.element_ty == tl.float16:
        weights = tl.where(weights > 65504.0, 65504.0, weights)
        weights = tl.where(weights < -65504.0, -65504.0, weights)
    return weights.to(like.dtype.element_ty)


@kernel
def _product_kernel(x, values, scales, steps, mean, table, bias, y, count, columns, rows, width, group, step, CODEC: tl.constexpr, HAS_BIAS: tl.constexpr, IS_ONE: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    row = tl.program_id(0) * N + tl.arange(0, N)
    line = tl.program_id(1) * M + tl.arange(0, M)
    at = line.to(tl.int64)[:, None] * columns
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, width, K):
        byte = start + tl.arange(0, K)
        across, down = row[None, :], byte[:, None]
        first, second = _decoded(
            values, scales, steps, mean, table, across, down, rows, width, group, CODEC
        )
        column = byte * PACKED
        within = (line < count)[:, None] & (column < columns)[None, :]
        a = tl.load(x + at + column[None, :], mask=within, other=0.0)
        if IS_ONE:
            wide = tl.trans(a).to(tl.float32) * _as(first, x).to(tl.float32)
            total += tl.sum(wide, axis=0)[None, :]
        else:
            total += tl.dot(a, _as(first, x), input_precision="ieee")
        if PACKED == 2:
            within = (line < count)[:, None] & (column + 1 < columns)[None, :]
            a = tl.load(x + at + column[None, :] + 1, mask=within, other=0.0)
            if IS_ONE:
                wide = tl.trans(a).to(tl.float32) * _as(second, x).to(tl.float32)
                total += tl.sum(wide, axis=0)[None, :]
            else:
                total += tl.dot(a, _as(second, x), input_precision="ieee")
    if PACKED == 1:
        total *= tl.load(scales + row * step, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    within = (line < count)[:, None] & (row < rows)[None, :]
    place = line.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=within)


@kernel
def _weights_kernel(values, scales, steps, mean, table, y, columns, rows, width, group, CODEC: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    byte = (tl.program_id(0) * K + tl.arange(0, K))[None, :]
    row = (tl.program_id(1) * N + tl.arange(0, N))[:, None]
    first, second = _decoded(
        values, scales, steps, mean, table, row, byte, rows, width, group, CODEC
    )
    place = row.to(tl.int64) * columns + byte * 2
    tl.store(y + place, _as(first, y), mask=(row < rows) & (byte * 2 < columns))
    tl.store(y + place + 1, _as(second, y), mask=(row < rows) & (byte * 2 + 1 < columns))


def multiplied(
    codec: str, members: Members, rows: int, x: torch.Tensor, bias: Bias
) -> torch.Tensor:
    """A linear layer on codes."""
    columns, y = x.shape[-1], x.new_empty((*x.shape[:-1], rows))
    count, inside = x.numel() // columns, bias is not None and bias.dtype == x.dtype
    *tensors, width, group = members
    is_one, packed = count == 1, 1 if CODECS[codec] < INT4 else 2
    m = 1 if is_one else 16 if count <= 16 else 64
    n, k = (16, 256) if is_one else (64, 64 if x.itemsize == 2 else 32)
    shown = bias.contiguous() if bias is not None and inside else x
    sizes = (count, columns, rows, width, group, int(tensors[1].numel() > 1))
    _launch(
        _product_kernel,
        (-(-rows // n), -(-count // m)),
        (x.contiguous(), *tensors, shown, y, *sizes),
        {"CODEC": CODECS[codec], "HAS_BIAS": inside, "IS_ONE": is_one, "PACKED": packed}
        | {"M": m, "N": n, "K": k},
    )
    return plus(y, None if inside else bias)


def decoded(
    codec: str, members: Members, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Weights of four bits."""
    *tensors, width, group = members
    y = torch.empty(rows, columns, dtype=dtype, device=tensors[0].device)
    n, k = (1, 1024) if rows == 1 else (16, 64)
    _launch(
        _weights_kernel,
        (-(-width // k), -(-rows // n)),
        (*tensors, y, columns, rows, width, group),
        {"CODEC": CODECS[codec], "N": n, "K": k},
    )
    return y


def _launch(
    run: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch a kernel, unless an executor asks for layouts only."""
    if not isinstance(arguments[0], internals.FakeTensor):
        launched(run, grid, *arguments, **constants)


def of_eight_bits(values: torch.Tensor, scales: torch.Tensor) -> Members:
    """The members of int8 and fp8. Codes of fp8 are read as the bytes that they are."""
    codes, scales = values.contiguous().view(torch.int8), scales.contiguous()
    return codes, scales, scales, scales, scales, values.shape[1], 1


def of_int4(values: torch.Tensor, scales_and_zeros: torch.Tensor) -> Members:
    """The members of int4, whose rows may be padded."""
    width = values.shape[1]
    both, group = scales_and_zeros.contiguous(), width * 2 // scales_and_zeros.shape[0]
    return values.contiguous(), both, both, both, both, width, group


def of_nf4(values: torch.Tensor, columns: int, *others: torch.Tensor) -> Members:
    """The members of nf4: `others` are scales, steps, mean and table."""
    scales, *floating = (one.contiguous() for one in others)
    steps, mean, table = (one.float() for one in floating)
    return values.contiguous(), scales, steps, mean, table, (columns + 1) // 2, NF4_BLOCK
