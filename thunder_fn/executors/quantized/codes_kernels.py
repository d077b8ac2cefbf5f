"""codes: linear layers on codes by C++ and Triton that decode where they multiply.

    q = tfn.quantize(tfn.jit(model), "nf4")        # this executor is one of q's

Decoding in PyTorch's ops writes whole weights and reads them again, and has no fast way to look
codes up on CPUs. The kernels (`codes_cpp.py`) read codes once. Few rows of activations are
multiplied with codes that are decoded in registers, more rows with a few rows of weights in the
processor's cache. For many rows weights are written, and PyTorch multiplies. Sums are those of
float32; weights are in the dtype of the activations, as the composites mean.

On a GPU each layer is one launch of a Triton kernel (`codes_triton.py`), for any number of rows.
Activations of eight bits are rounded in one launch, and then multiplied by PyTorch's `_int_mm` or
`_scaled_mm`, or by that kernel if they are few.

The kernels are compiled when the first program that uses them is made. That takes a second or two;
they are kept on disk (`thunder_fn.executors.torchinductor`). Without a compiler this executor takes
nothing.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import linear

from thunder_fn import torch_internals as internals
from thunder_fn.errors import ExecutorError
from thunder_fn.executors.quantized import codes_cpp, codes_triton
from thunder_fn.executors.quantized.kernels import (
    row_count,
    scaled_mm,
    suits_int8,
    suits_int_mm,
    suits_scaled_mm,
)
from thunder_fn.executors.torchinductor.codegen import Kernel
from thunder_fn.executors.torchinductor.compiling import Failed, functions_of_kernels
from thunder_fn.extend import OperatorExecutor
from thunder_fn.interpreters.quantize.eight_bits import (
    FP8,
    FP8_LARGEST,
    INT8_LARGEST,
    floats,
    fp8_dynamic_linear,
    fp8_linear,
    int8_dynamic_linear,
    int8_linear,
    scaled_product,
)
from thunder_fn.interpreters.quantize.four_bits import (
    NF4_BLOCK,
    int4_linear,
    int4_weights,
    nf4_linear,
    nf4_weights,
)
from thunder_fn.interpreters.quantize.scheme import Bias, in_dtype, plus, rounded_rows
from thunder_fn.torch_internals.inductor import multiplies_integers

EXECUTOR = OperatorExecutor("codes", version="2", numerics="precision-changing")
NUMBERS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The dtypes that kernels compute with; others are cast."""
FLOATS = (*NUMBERS, torch.float16)
SOME_ROWS = 32
"""The number of rows of activations beyond which writing weights costs less than PyTorch's
product gains.
"""


@cache
def kernels(codec: str, dtype: torch.dtype) -> tuple[Kernel, Kernel]:
    """The product with codes and the weights, in a dtype. They are compiled together."""
    return codes_cpp.product(codec, NUMBERS[dtype]), codes_cpp.weights(codec, NUMBERS[dtype])


@cache
def functions(codec: str, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Compile these kernels; None if nothing can compile them."""
    product, weights = kernels(codec, computed_in(dtype))
    found = functions_of_kernels((product, weights))
    return None if isinstance(found, Failed) else (found[product.key], found[weights.key])


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels compute numbers of a dtype."""
    return dtype if dtype in NUMBERS else torch.float32


def _found(codec: str, dtype: torch.dtype) -> tuple[Any, Any]:
    found = functions(codec, dtype)
    if found is None:
        raise ExecutorError("codes: nothing here compiles the kernels of this program")
    return found


def multiplied(
    codec: str, members: tuple[Any, ...], rows: int, x: torch.Tensor, bias: Bias
) -> torch.Tensor:
    """A linear layer by a kernel, for some rows of activations."""
    # `to` the same dtype takes longer than asking
    own = (x if x.dtype in NUMBERS else x.float()).contiguous()
    columns = x.shape[-1]
    y = own.new_empty((*x.shape[:-1], rows))
    inside = (
        bias is not None
        and bias.dtype == own.dtype
        and bias.shape == (rows,)
        and bias.is_contiguous()
    )
    if not isinstance(y, internals.FakeTensor):  # an executor asks for layouts
        run, _ = _found(codec, own.dtype)
        shown = bias if inside else own
        run(
            *members,
            rows,
            columns,
            own,
            shown,
            inside,
            y,
            x.numel() // columns,
            torch.get_num_threads(),
        )
    result = y if own.dtype == x.dtype else y.to(x.dtype)
    return result if inside else plus(result, bias)


def decoded(
    codec: str, members: tuple[Any, ...], rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Weights by a kernel."""
    y = torch.empty(rows, columns, dtype=computed_in(dtype))
    if not isinstance(y, internals.FakeTensor):
        _, run = _found(codec, dtype)
        run(*members, rows, columns, y, torch.get_num_threads())
    return in_dtype(y, dtype)


# ---- eight bits ----


def _codec(values: torch.Tensor) -> str:
    return "fp8" if values.dtype == FP8 else "int8"


def _eight_bits(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    if x.device.type == "cuda":
        members = codes_triton.of_eight_bits(values, scales)
        return codes_triton.multiplied(_codec(values), members, values.shape[0], x, bias)
    if row_count(x) > SOME_ROWS:
        return scaled_product(x, values, scales, bias, _floats)
    if scales.dtype not in NUMBERS:
        scales = scales.float()
    scales, step = scales.contiguous(), int(scales.numel() > 1)
    members = (values.contiguous(), scales, step, scales.dtype == torch.bfloat16)
    return multiplied(_codec(values), members, values.shape[0], x, bias)


def _floats(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # codes alone, which scales have no part in
    members = (values.contiguous(), torch.empty(0), 0, 0)
    return decoded(_codec(values), members, values.numel() // 64, 64, dtype).reshape(values.shape)


# ---- four bits ----


def _nf4(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    mean: torch.Tensor,
    table: torch.Tensor,
    bias: Bias = None,
    *,
    rows: int,
) -> torch.Tensor:
    columns = x.shape[-1]
    if x.device.type == "cuda":
        found = codes_triton.of_nf4(values, columns, scales, steps, mean, table)
        return codes_triton.multiplied("nf4", found, rows, x, bias)
    if row_count(x) > SOME_ROWS:
        w = _nf4_weights(values, scales, steps, mean, table, rows * columns, x.dtype)
        return linear(x, w.reshape(rows, columns), bias)
    return multiplied("nf4", _nf4_members(values, scales, steps, mean, table), rows, x, bias)


def _nf4_weights(
    values: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    mean: torch.Tensor,
    table: torch.Tensor,
    count: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    if values.device.type == "cuda":
        found = codes_triton.of_nf4(values, count, scales, steps, mean, table)
        return codes_triton.decoded("nf4", found, 1, count, dtype).flatten()
    members = _nf4_members(values, scales, steps, mean, table)
    return decoded("nf4", members, scales.numel(), NF4_BLOCK, dtype).flatten()[:count]


def _nf4_members(values: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales, *floating = others
    return (
        values.contiguous(),
        scales.contiguous(),
        *(part.float().contiguous() for part in floating),
    )


def _int4(
    x: torch.Tensor,
    values: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    bias: Bias = None,
    *,
    columns: int,
) -> torch.Tensor:
    groups, rows, _ = scales_and_zeros.shape
    if x.device.type == "cuda":
        members = codes_triton.of_int4(values, scales_and_zeros)
        return codes_triton.multiplied("int4", members, rows, x, bias)
    if row_count(x) > SOME_ROWS:
        return linear(x, _int4_weights(values, scales_and_zeros, columns, x.dtype), bias)
    return multiplied(
        "int4",
        (values.contiguous(), scales_and_zeros.contiguous(), columns // groups),
        rows,
        x,
        bias,
    )


def _int4_weights(
    values: torch.Tensor, scales_and_zeros: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    groups, rows, _ = scales_and_zeros.shape
    if values.device.type == "cuda":
        found = codes_triton.of_int4(values, scales_and_zeros)
        return codes_triton.decoded("int4", found, rows, columns, dtype)
    members = (values.contiguous(), scales_and_zeros.contiguous(), columns // groups)
    return decoded("int4", members, rows, columns, dtype)


# ---- where they suit ----


def _runs(codec: str, device: torch.device, dtype: torch.dtype, is_whole: bool) -> bool | str:
    """Test for floats that float32 holds, and a compiler: of C++, which reads whole steps of
    columns, or of Triton.
    """
    is_on_gpu = device.type == "cuda"
    if dtype not in FLOATS or not (is_on_gpu or (device.type == "cpu" and is_whole)):
        return False
    if is_on_gpu:
        return codes_triton.AVAILABLE or "Triton is not installed"
    return functions(codec, dtype) is not None or "nothing here compiles C++"


def _suits_int8(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> bool | str:
    """Test, where PyTorch's kernel suits, for integer instructions, which that does not use."""
    is_own = multiplies_integers() or not suits_int8(x, values, scales, bias)
    is_int8 = is_own and values.dtype == torch.int8
    return is_int8 and _is_some(x) and _runs("int8", x.device, x.dtype, x.shape[-1] % 64 == 0)


def _suits_fp8(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> bool | str:
    is_fp8 = values.dtype == FP8 and _is_some(x)
    return is_fp8 and _runs("fp8", x.device, x.dtype, x.shape[-1] % 64 == 0)


def _is_some(x: torch.Tensor) -> bool:
    """Test for activations with elements, for which a GPU has something to launch."""
    return x.device.type == "cpu" or x.numel() > 0


def _suits_floats(values: torch.Tensor, dtype: torch.dtype) -> bool | str:
    """Test for codes on a CPU: elsewhere PyTorch's conversion is as fast."""
    is_known = values.dtype in (FP8, torch.int8) and values.device.type == "cpu"
    return is_known and _runs(_codec(values), values.device, dtype, values.numel() % 64 == 0)


def _suits_nf4(x: torch.Tensor, *codes: Any, rows: int, bias: Bias = None) -> bool | str:
    """Test that bytes end with rows, and on a CPU blocks of weights too."""
    columns = x.shape[-1]
    is_even = columns % 2 == 0 and _is_some(x)
    return is_even and _runs("nf4", x.device, x.dtype, columns % NF4_BLOCK == 0)


def _suits_nf4_weights(values: torch.Tensor, *others: Any) -> bool | str:
    *_, dtype = others
    return _runs("nf4", values.device, dtype, is_whole=True)


def _suits_int4(
    x: torch.Tensor,
    values: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    bias: Bias = None,
    *,
    columns: int,
) -> bool | str:
    return _is_some(x) and _suits_int4_weights(values, scales_and_zeros, columns, x.dtype)


def _suits_int4_weights(
    values: torch.Tensor, scales_and_zeros: torch.Tensor, columns: int, dtype: torch.dtype
) -> bool | str:
    """Test, on a CPU, for whole steps of columns, and groups of half ones, that nothing pads."""
    groups = scales_and_zeros.shape[0]
    fits = columns % 64 == 0 and columns % groups == 0 and columns // groups % 32 == 0
    is_half = scales_and_zeros.dtype == torch.bfloat16
    return is_half and _runs("int4", values.device, dtype, fits)


_OPERATORS: dict[str, Any] = {}
for _composite, _name, _run, _suited in (
    (int8_linear, "int8", _eight_bits, _suits_int8),
    (fp8_linear, "fp8", _eight_bits, _suits_fp8),
    (floats, "floats", _floats, _suits_floats),
    (nf4_linear, "nf4", _nf4, _suits_nf4),
    (nf4_weights, "nf4_weights", _nf4_weights, _suits_nf4_weights),
    (int4_linear, "int4", _int4, _suits_int4),
    (int4_weights, "int4_weights", _int4_weights, _suits_int4_weights),
):
    _OPERATORS[_name] = EXECUTOR.register_operator(_name, like=_composite, fn=_run)
    EXECUTOR.register_implementation(_composite, _OPERATORS[_name], checker=_suited)


# ---- activations of eight bits, on a GPU ----


def _int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    units, steps = rounded_rows(x, INT8_LARGEST)
    codes = torch.round(units).nan_to_num(0.0).clamp(-INT8_LARGEST, INT8_LARGEST)
    return codes.to(torch.int8), steps


def _fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    units, steps = rounded_rows(x, FP8_LARGEST)
    return units.nan_to_num(0.0).to(FP8), steps


def _int8_seen(x: torch.Tensor) -> torch.Tensor:
    codes, steps = _int8_rows(x)
    return (codes.float() * steps).to(x.dtype).reshape(x.shape)


def _fp8_seen(x: torch.Tensor) -> torch.Tensor:
    codes, steps = _fp8_rows(x)
    return (codes.float() * steps).to(x.dtype).reshape(x.shape)


def _finished(
    sums: torch.Tensor, steps: torch.Tensor, scales: torch.Tensor, bias: Bias, *, dtype: torch.dtype
) -> torch.Tensor:
    return plus((sums * steps * scales).to(dtype), bias)


for _name, _like, _run in (
    ("int8_rows", _int8_rows, partial(codes_triton.rounded, dtype=torch.int8)),
    ("fp8_rows", _fp8_rows, partial(codes_triton.rounded, dtype=FP8)),
    ("int8_seen", _int8_seen, partial(codes_triton.seen, dtype=torch.int8)),
    ("fp8_seen", _fp8_seen, partial(codes_triton.seen, dtype=FP8)),
    ("finished", _finished, codes_triton.finished),
):
    _OPERATORS[_name] = EXECUTOR.register_operator(_name, like=_like, fn=_run)


def _dynamic_int8(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """A product of integers; few rows are rounded where they are, and multiplied as floats."""
    if not suits_int_mm(x, values, scales):
        return _OPERATORS["int8"](_OPERATORS["int8_seen"](x), values, scales, bias)
    codes, steps = _OPERATORS["int8_rows"](x)
    sums = torch.ops.aten._int_mm(codes, values.t())
    y = _OPERATORS["finished"](sums, steps, scales, bias, dtype=x.dtype)
    return y.reshape(*x.shape[:-1], values.shape[0])


def _dynamic_fp8(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """A product of floats of eight bits, where the GPU has tensor cores for them."""
    if suits_scaled_mm(x, values, scales) is not True:
        return _OPERATORS["fp8"](_OPERATORS["fp8_seen"](x), values, scales, bias)
    codes, steps = _OPERATORS["fp8_rows"](x)
    return scaled_mm(x, codes, steps, values, scales, bias)


def _suits_dynamic(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> bool | str:
    """Test for a GPU."""
    is_known = x.device.type == "cuda" and values.dtype in (FP8, torch.int8) and _is_some(x)
    return is_known and _runs(_codec(values), x.device, x.dtype, is_whole=True)


for _composite, _transform in (
    (int8_dynamic_linear, _dynamic_int8),
    (fp8_dynamic_linear, _dynamic_fp8),
):
    EXECUTOR.register_implementation(
        _composite, checker=_suits_dynamic, execution_transform=_transform
    )
