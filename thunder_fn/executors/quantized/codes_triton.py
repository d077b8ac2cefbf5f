"""The Triton of the executor codes: products with codes, codes as floats, and activations as codes,
in one launch each.

A program multiplies a block of rows of activations with a block of rows of codes, which it decodes
in registers. One row is a sum of products; more rows are blocks of a matrix product, for tensor
cores. If two codes lie in a byte, the even columns of the activations are multiplied with the one
half and the odd columns with the other. Sums are in float32; scales of rows are applied to them.
If blocks of rows are too few for the GPU's processors, some programs share a block's columns, and a
second launch adds their sums, always in the same order.

Activations are rounded row by row, each in a step of its own, to codes or to the floats that these
stand for.

Tested: in Triton's interpreter, and compiled for sm_90, both on a simulated GPU. No GPU has run it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.triton.kernels import AVAILABLE as AVAILABLE, kernel, launched, tl
from thunder_fn.interpreters.quantize.eight_bits import FP8_LARGEST, INT8_LARGEST
from thunder_fn.interpreters.quantize.four_bits import NF4_BLOCK
from thunder_fn.interpreters.quantize.scheme import Bias, plus

INT8, FP8, INT4, NF4 = range(4)
"""The codecs, as kernels know them."""
CODECS = {"int8": INT8, "fp8": FP8, "int4": INT4, "nf4": NF4}

SHARE = 4
"""The least steps of a program that shares a block's columns."""

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
def _product_kernel(x, values, scales, steps, mean, table, bias, y, count, columns, rows, width, group, step, share, CODEC: tl.constexpr, HAS_BIAS: tl.constexpr, IS_ONE: tl.constexpr, IS_PART: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    row = tl.program_id(0) * N + tl.arange(0, N)
    line = tl.program_id(1) * M + tl.arange(0, M)
    at = line.to(tl.int64)[:, None] * columns
    total = tl.zeros([M, N], dtype=tl.float32)
    part = tl.program_id(2)
    for start in range(part * share, tl.minimum((part + 1) * share, width), K):
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
    if IS_PART:
        place += part.to(tl.int64) * count * rows
    tl.store(y + place, total.to(y.dtype.element_ty), mask=within)


@kernel
def _sum_kernel(parts, bias, y, size, rows, number, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Add the sums of the programs that shared columns."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(number):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % rows, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)


@kernel
def _rounded_kernel(x, codes, steps, columns, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, AS_CODES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top, bad = 0.0, 0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32))
        is_bad = (size != size) | (size == float("inf"))  # such a row has no step
        bad = tl.maximum(bad, tl.max(is_bad.to(tl.int32), axis=0))
        top = tl.maximum(top, tl.max(tl.where(is_bad, 0.0, size), axis=0))
    step = tl.maximum(tl.div_rn(top, LARGEST), 1.2037062152420224e-35)
    if AS_CODES:
        tl.store(steps + row, tl.where(bad != 0, float("nan"), step))
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        number = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        code = tl.where(bad != 0, 0.0, tl.div_rn(number, tl.zeros([BLOCK], tl.float32) + step))
        # The sum with 1.5 * 2 ** (23 + n) has its last place at 2 ** n: it is rounded there.
        place = tl.zeros([BLOCK], tl.int32) + 1094713344  # the bits of 1.5 * 2 ** 3: n is 0
        if not IS_INTEGER:  # n is 3 less than the exponent, which is -6 or more
            place = tl.maximum(code.to(tl.int32, bitcast=True) & 2139095040, 121 << 23) + (1 << 22)
        large = (place + (20 << 23)).to(tl.float32, bitcast=True)
        code = code + large - large
        if not AS_CODES:
            code = tl.where(bad != 0, float("nan"), code * step)
        tl.store(codes + row * columns + at, code.to(codes.dtype.element_ty), mask=at < columns)


@kernel
def _finished_kernel(sums, steps, scales, bias, y, size, rows, STEP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within, row = at < size, at % rows
    total = tl.load(sums + at, mask=within, other=0).to(tl.float32)
    total *= tl.load(steps + at // rows, mask=within, other=0.0)
    total *= tl.load(scales + row * STEP, mask=within, other=0.0).to(tl.float32)
    total = total.to(y.dtype.element_ty)
    if HAS_BIAS:
        added = tl.load(bias + row, mask=within, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + added).to(y.dtype.element_ty)
    tl.store(y + at, total, mask=within)


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
    m, n, k = (1, 16, 256) if is_one else (16, 16, 128) if count <= 16 else (64, 64, 64)
    k = k // 2 if x.itemsize > 2 and not is_one else k
    shown = bias.contiguous() if bias is not None and inside else x
    parts, share = _shares(x.device, -(-rows // n) * -(-count // m), width, k)
    y_or_parts = y if parts == 1 else y.new_empty((parts, count, rows), dtype=torch.float32)
    sizes = (count, columns, rows, width, group, int(tensors[1].numel() > 1), share)
    _launch(
        _product_kernel,
        (-(-rows // n), -(-count // m), parts),
        (x.contiguous(), *tensors, shown, y_or_parts, *sizes),
        {"CODEC": CODECS[codec], "HAS_BIAS": inside and parts == 1, "IS_ONE": is_one}
        | {"IS_PART": parts > 1, "PACKED": packed, "M": m, "N": n, "K": k},
    )
    if parts > 1:
        size = count * rows
        grid = (-(-size // 256),)
        given = (y_or_parts, shown, y, size, rows, parts)
        _launch(_sum_kernel, grid, given, {"HAS_BIAS": inside, "BLOCK": 256})
    return plus(y, None if inside else bias)


def _shares(device: torch.device, blocks: int, width: int, step: int) -> tuple[int, int]:
    """The number of programs that share a block's columns, and the bytes of a row that each has."""
    steps, parts = -(-width // step), 1
    while blocks * parts < _processors(device) and steps // (2 * parts) >= SHARE:
        parts *= 2
    share = -(-steps // parts)
    return -(-steps // share), share * step


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rounded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of activations as codes of int8 or e4m3, and their steps. A row with a number that
    is not finite has zeros, and the step NaN.
    """
    columns = x.shape[-1]
    codes = torch.empty(x.numel() // columns, columns, dtype=dtype, device=x.device)
    steps = codes.new_empty((codes.shape[0], 1), dtype=torch.float32)
    _round(x, codes, steps, is_integer=dtype == torch.int8)
    return codes, steps


def seen(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats that the codes of activations stand for."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _round(x, y, y, is_integer=dtype == torch.int8)
    return y


def _round(x: torch.Tensor, y: torch.Tensor, steps: torch.Tensor, *, is_integer: bool) -> None:
    columns, largest = x.shape[-1], INT8_LARGEST if is_integer else FP8_LARGEST
    constants = {"LARGEST": float(largest), "IS_INTEGER": is_integer, "AS_CODES": y is not steps}
    block = min(4096, 1 << (columns - 1).bit_length())
    grid = (x.numel() // columns,)
    given = (x.contiguous(), y, steps, columns)
    _launch(_rounded_kernel, grid, given, constants | {"BLOCK": block})


def finished(
    sums: torch.Tensor, steps: torch.Tensor, scales: torch.Tensor, bias: Bias, dtype: torch.dtype
) -> torch.Tensor:
    """Sums of products of int8 in the steps of their rows and columns, and the bias."""
    count, rows = sums.shape
    y = torch.empty(count, rows, dtype=dtype, device=sums.device)
    inside = bias is not None and bias.dtype == dtype
    shown = bias.contiguous() if bias is not None and inside else steps
    given = (sums, steps.contiguous(), scales.contiguous(), shown, y, sums.numel(), rows)
    constants = {"STEP": int(scales.numel() > 1), "HAS_BIAS": inside, "BLOCK": 1024}
    _launch(_finished_kernel, (-(-sums.numel() // 1024),), given, constants)
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
