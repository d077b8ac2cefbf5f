"""quantized: linear layers on codes by the kernels that PyTorch has for them.

    v4 = _weight_int8pack_mm(v0, v1, v3)

A composite such as `int8_linear` means decoding and multiplying. If PyTorch has a faster kernel for
the machine and the types, this executor calls it; anything else is left as it is. `quantize` of a
jitted function adds the executor to those of the function. The choice is a function of types, so it
is tested without the machine.

Tested: the CPU's kernels, and `_scaled_mm` on a CPU, where it is slow and not chosen.

Source: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.extend import OperatorExecutor
from thunder_fn.interpreters.quantize.eight_bits import (
    FP8,
    FP8_LARGEST,
    INT8_LARGEST,
    fp8_dynamic_linear,
    int8_dynamic_linear,
    int8_linear,
    int8_static_linear,
)
from thunder_fn.interpreters.quantize.four_bits import GROUPS, int4_linear, packed_codes
from thunder_fn.interpreters.quantize.scheme import Bias, plus, rounded_rows

aten = torch.ops.aten
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FEW_ROWS = 8
"""The rows of activations up to which reading eight-bit weights costs more than multiplying them.
There PyTorch's int8 kernel is faster than decoding. One Zen 4 core, 1024 x 1024: 60 against 240
us for one row, 230 against 290 for 8, 450 against 380 for 16.
"""

EXECUTOR = OperatorExecutor("quantized", version=torch.__version__, numerics="precision-changing")


def row_count(x: torch.Tensor) -> int:
    """The number of rows of activations."""
    return x.numel() // max(x.shape[-1], 1)


def on_rows(x: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A product of a matrix of activations, for activations of any rank."""
    if x.dim() == 2:
        return multiply(x.contiguous())
    return multiply(x.reshape(-1, x.shape[-1]).contiguous()).reshape(*x.shape[:-1], -1)


# ---- int8 weights ----


def suits_int8(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> bool:
    """Test for bf16 on CPUs, for which the kernel is vectorised, and rows in whole vectors."""
    rows, columns = values.shape
    few = 0 < row_count(x) <= FEW_ROWS
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and few
        and rows % 16 == 0
        and columns % 64 == 0
    )


def int8_kernel(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """Rows of codes are multiplied as they are read."""
    return plus(
        on_rows(x, lambda rows: aten._weight_int8pack_mm(rows, values, scales.to(x.dtype))), bias
    )


EXECUTOR.register_implementation(int8_linear, checker=suits_int8, execution_transform=int8_kernel)


# ---- int8 weights and activations ----


def suits_int_mm(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> bool:
    """Test for integer matrix products. CPUs have them for any shape, but PyTorch's sums of one
    product are wrong; CUDA has them for more than 16 rows, and dims in eights.
    """
    if x.device.type == "cuda":
        return row_count(x) > 16 and values.shape[0] % 8 == 0 and values.shape[1] % 8 == 0
    return x.device.type == "cpu" and row_count(x) > 0 and values.shape[1] > 1


def int_mm(codes: torch.Tensor, values: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Sums of products of integers, exact, in the steps of their rows."""
    return aten._int_mm(codes, values) * steps


def int_mm_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: Bias = None,
    multiply: Multiply = int_mm,
) -> torch.Tensor:
    """A product of integers, and then the scales of the weight."""
    codes, steps = rounded_rows(x, INT8_LARGEST)
    codes = torch.round(codes).clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
    y = multiply(codes, values.t(), steps) * scales
    return plus(y.to(x.dtype).reshape(*x.shape[:-1], values.shape[0]), bias)


EXECUTOR.register_implementation(
    int8_dynamic_linear, checker=suits_int_mm, execution_transform=int_mm_linear
)


def suits_static(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    input_scale: torch.Tensor,
    bias: Bias = None,
) -> bool:
    """Decide like `suits_int_mm`."""
    return suits_int_mm(x, values, scales)


def int_mm_static_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    input_scale: torch.Tensor,
    bias: Bias = None,
) -> torch.Tensor:
    """Codes that are NaN, of such activations or where nothing was calibrated, are no integers:
    the step of their row is NaN.
    """
    units = torch.round(x.reshape(-1, x.shape[-1]).float() / input_scale)
    steps = torch.where(units.isnan().any(1, keepdim=True), float("nan"), input_scale)
    codes = units.nan_to_num(0.0).clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
    y = aten._int_mm(codes, values.t()) * steps * scales
    return plus(y.to(x.dtype).reshape(*x.shape[:-1], values.shape[0]), bias)


EXECUTOR.register_implementation(
    int8_static_linear, checker=suits_static, execution_transform=int_mm_static_linear
)


# ---- int4 weights ----


@cache
def kernel_block() -> int | None:
    """The number of rows of a block in the bytes that PyTorch's kernel reads on this processor;
    None if they lie otherwise.
    """
    with internals.isolated(), internals.no_torch_function():
        codes = torch.arange(128 * 64, dtype=torch.int32).reshape(128, 64) * 7 % 16
        wanted = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        values = packed_codes(codes)
        return next(
            (block for block in (64, 32, 16) if torch.equal(in_blocks(values, block), wanted)), None
        )


def in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Codes as PyTorch's kernel reads them: blocks of rows, column after column, row d beside
    row d + block / 2.
    """
    first, second = values.reshape(-1, 2, block // 2, values.shape[1]).unbind(1)
    even, odd = first & 15 | second << 4, first >> 4 | second & 240
    return torch.stack((even, odd), -1).flatten(-2).transpose(1, 2).reshape(values.shape)


def suits_int4(
    x: torch.Tensor,
    values: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    bias: Bias = None,
    *,
    columns: int,
) -> bool:
    """Test for whole blocks and groups. The layout of its bytes depends on the processor, which no
    state may, so they are made at each call. That costs less than decoding, unless a decoded weight
    is multiplied with many rows.
    """
    groups, rows, _ = scales_and_zeros.shape
    is_half = x.device.type == "cpu" and x.dtype == scales_and_zeros.dtype == torch.bfloat16
    is_whole = (
        values.shape[1] * 2 == columns and columns % groups == 0 and columns // groups in GROUPS
    )
    few = 0 < row_count(x) <= 4 * FEW_ROWS
    return (
        is_half and is_whole and few and (block := kernel_block()) is not None and rows % block == 0
    )


def int4_kernel(
    x: torch.Tensor,
    values: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    bias: Bias = None,
    *,
    columns: int,
) -> torch.Tensor:
    """Multiply like `int8_kernel`, with a step and a zero for each group."""
    packed, group = in_blocks(values, kernel_block() or 0), columns // scales_and_zeros.shape[0]
    y = on_rows(
        x, lambda rows: aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales_and_zeros)
    )
    return plus(y, bias)


EXECUTOR.register_implementation(int4_linear, checker=suits_int4, execution_transform=int4_kernel)


# ---- fp8 weights and activations ----


def suits_scaled_mm(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> bool | str:
    """Test for tensor cores for e4m3: from compute capability 8.9 on, with scales of rows from
    9.0 on.
    """
    if x.device.type != "cuda":
        return False
    divides = values.shape[0] % 16 == 0 and values.shape[1] % 16 == 0
    if not (divides and x.dtype == torch.bfloat16 and row_count(x) > 0):
        return False
    major, minor = torch.cuda.get_device_capability(x.device)
    return major >= 9 or f"its compute capability is {major}.{minor}, and 9.0 is needed"


def scaled_mm_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """Multiply matrices of eight bits, with a scale for each row of either."""
    codes, steps = rounded_rows(x, FP8_LARGEST)
    return scaled_mm(x, codes.to(FP8), steps, values, scales, bias)


def scaled_mm(
    x: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: Bias,
) -> torch.Tensor:
    """The product of activations that are codes by now."""
    columns = scales.reshape(1, -1).expand(1, values.shape[0]).contiguous()
    inside = bias if bias is not None and bias.dtype == x.dtype else None
    y = aten._scaled_mm(codes, values.t(), steps, columns, inside, out_dtype=x.dtype)
    y = y.reshape(*x.shape[:-1], values.shape[0])
    return y if inside is not None else plus(y, bias)


EXECUTOR.register_implementation(
    fp8_dynamic_linear, checker=suits_scaled_mm, execution_transform=scaled_mm_linear
)
