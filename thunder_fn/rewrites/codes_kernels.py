"""codes: linear layers on codes, for a few rows of activations, by C++ that decodes in registers.

    q = tfn.quantize(tfn.jit(model, executors=["codes"]), "nf4")

A row of results is a sum over a row of codes: the codes are read once and nothing is written but results, where decoding and
multiplying writes whole weights and reads them again. Codecs differ in how sixteen codes become floats; where there is no
AVX-512 they are decoded one by one. Products are summed in float32.

The kernels are compiled when one is first called, and kept on disk (`thunder_fn.executors.compiled`). Without a compiler
the composite is computed, as for anything that does not suit them.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn.executors.compiled.codegen import Kernel
from thunder_fn.executors.compiled.compiling import Failed, functions_of_kernels
from thunder_fn.executors.operator_executor import OperatorExecutor
from thunder_fn.rewrites.eight_bits import FP8, fp8_linear, int8_linear
from thunder_fn.rewrites.four_bits import NF4_BLOCK, int4_linear, nf4_linear
from thunder_fn.rewrites.kernels import FEW_ROWS, row_count, suits_int8
from thunder_fn.rewrites.scheme import Bias, plus

EXECUTOR = OperatorExecutor("codes", version="1", numerics="precision-changing")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_FRONT = """
#include <torch/csrc/inductor/cpp_prefix.h>
#if defined(CPU_CAPABILITY_AVX512)
using Floats = __m512;
static inline Floats all(float x) { return _mm512_set1_ps(x); }
static inline Floats load(const float* x) { return _mm512_loadu_ps(x); }
static inline Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats plus_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
static inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
static inline __m512i bytes(const uint8_t* x) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x)); }
#else
struct Floats { float each[16]; };
template <typename F> static inline Floats made(F f) { Floats y; for (int i = 0; i < 16; ++i) y.each[i] = f(i); return y; }
static inline Floats all(float x) { return made([&](int) { return x; }); }
static inline Floats load(const float* x) { return made([&](int i) { return x[i]; }); }
static inline Floats product(Floats a, Floats b) { return made([&](int i) { return a.each[i] * b.each[i]; }); }
static inline Floats plus_product(Floats a, Floats b, Floats sum) {
    return made([&](int i) { return a.each[i] * b.each[i] + sum.each[i]; });
}
static inline float sum_of(Floats x) { float sum = 0; for (float one : x.each) sum += one; return sum; }
#endif
"""

_PRODUCT = """
template <int N> static void some_rows(const Codec& codec, const float* x, float* y, int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
        Floats sums[N][4], four[4];
        _Pragma("GCC unroll 4") for (int n = 0; n < N; ++n)
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) sums[n][i] = all(0.0f);
        for (int64_t column = 0; column < codec.columns; column += 64) {
            codec.decode(row, column, four);
            _Pragma("GCC unroll 4") for (int n = 0; n < N; ++n)
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)
                    sums[n][i] = plus_product(four[i], load(x + n * codec.columns + column + 16 * i), sums[n][i]);
        }
        _Pragma("GCC unroll 4") for (int n = 0; n < N; ++n)
            y[n * codec.rows + row] = codec.scale(row) * (
                (sum_of(sums[n][0]) + sum_of(sums[n][1])) + (sum_of(sums[n][2]) + sum_of(sums[n][3])));
    }
}
static void multiply(const Codec& codec, const float* x, float* y, int64_t count, int64_t threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t from = 0; from < codec.rows; from += 32) {
        const int64_t to = std::min<int64_t>(codec.rows, from + 32);
        int64_t n = 0;
        for (; n + 4 <= count; n += 4) some_rows<4>(codec, x + n * codec.columns, y + n * codec.rows, from, to);
        for (; n < count; ++n) some_rows<1>(codec, x + n * codec.columns, y + n * codec.rows, from, to);
    }
}
"""

_INT8 = """
struct Codec {
    const int8_t* values; const float* scales; int64_t rows, columns;
    float scale(int64_t row) const { return scales[row]; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        for (int i = 0; i < 4; ++i) {
            const int8_t* codes = values + row * columns + column + 16 * i;
#if defined(CPU_CAPABILITY_AVX512)
            four[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
#else
            four[i] = made([&](int j) { return float(codes[j]); });
#endif
        }
    }
};
"""

_FP8 = """
struct Codec {  // the bits of a half whose exponent is 8 less
    const int8_t* values; const float* scales; int64_t rows, columns;
    float scale(int64_t row) const { return scales[row] * 256.0f; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        for (int i = 0; i < 4; ++i) {
            const int8_t* codes = values + row * columns + column + 16 * i;
#if defined(CPU_CAPABILITY_AVX512)
            const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes)), 7);
            four[i] = _mm512_cvtph_ps(_mm256_andnot_si256(_mm256_set1_epi16(1 << 14), wide));
#else
            four[i] = made([&](int j) {
                return float(c10::Half(uint16_t((int16_t(codes[j]) << 7) & ~(1 << 14)), c10::Half::from_bits()));
            });
#endif
        }
    }
};
"""

_NF4 = """
struct Codec {  // 32 codes in 16 bytes, those in upper halves first
    const uint8_t* values; const int8_t* scales; const float* steps; const float* mean; const float* table; int64_t rows, columns;
    float scale(int64_t) const { return 1.0f; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const int64_t block = (row * columns + column) / 64;
        const uint8_t* codes = values + block * 32;
        const Floats greatest = all(float(scales[block]) * steps[block / 256] + mean[0]);
        for (int i = 0; i < 2; ++i) {
#if defined(CPU_CAPABILITY_AVX512)
            const __m512i two = bytes(codes + 16 * i);
            four[2 * i] = product(_mm512_permutexvar_ps(_mm512_srli_epi32(two, 4), load(table)), greatest);
            four[2 * i + 1] = product(_mm512_permutexvar_ps(two, load(table)), greatest);
#else
            four[2 * i] = product(made([&](int j) { return table[codes[16 * i + j] >> 4]; }), greatest);
            four[2 * i + 1] = product(made([&](int j) { return table[codes[16 * i + j] & 15]; }), greatest);
#endif
        }
    }
};
"""

_INT4 = """
struct Codec {  // 32 codes in 16 bytes, those in lower halves first
    const uint8_t* values; const float* both; int64_t group, rows, columns;
    float scale(int64_t) const { return 1.0f; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const float* own = both + 2 * (column / group * rows + row);
        const Floats step = all(own[0]), first = all(own[1] - 8.0f * own[0]);
        const uint8_t* codes = values + (row * columns + column) / 2;
        for (int i = 0; i < 2; ++i) {
#if defined(CPU_CAPABILITY_AVX512)
            const __m512i two = bytes(codes + 16 * i);
            const __m512i low = _mm512_and_si512(two, _mm512_set1_epi32(15)), high = _mm512_srli_epi32(two, 4);
            four[2 * i] = plus_product(_mm512_cvtepi32_ps(low), step, first);
            four[2 * i + 1] = plus_product(_mm512_cvtepi32_ps(high), step, first);
#else
            four[2 * i] = plus_product(made([&](int j) { return float(codes[16 * i + j] & 15); }), step, first);
            four[2 * i + 1] = plus_product(made([&](int j) { return float(codes[16 * i + j] >> 4); }), step, first);
#endif
        }
    }
};
"""


def _kernel(codec: str, *members: str) -> Kernel:
    """A product with codes: the members of the codec, then activations, results, and how many rows there are of these."""
    names = [f"m{i}" for i in range(len(members))]
    parameters = ", ".join(f"{type} {name}" for type, name in zip(members, names, strict=True))
    entry = (
        f'extern "C" void kernel({parameters}, const float* x, float* y, int64_t count, int64_t threads) {{\n'
        f"    multiply(Codec{{{', '.join(names)}}}, x, y, count, threads);\n}}\n"
    )
    return Kernel((*members, "const float*", "float*", "int64_t", "int64_t"), _FRONT + codec + _PRODUCT + entry)


_SIZES = ("int64_t", "int64_t")
INT8 = _kernel(_INT8, "const int8_t*", "const float*", *_SIZES)
FP8_ROWS = _kernel(_FP8, "const int8_t*", "const float*", *_SIZES)
NF4 = _kernel(_NF4, "const uint8_t*", "const int8_t*", "const float*", "const float*", "const float*", *_SIZES)
INT4 = _kernel(_INT4, "const uint8_t*", "const float*", "int64_t", *_SIZES)
KERNELS = (INT8, FP8_ROWS, NF4, INT4)


# ---- operators ----


def _multiplied(
    kernel: Kernel, members: tuple[Any, ...], rows: int, x: torch.Tensor, bias: Bias, order: int = 1
) -> torch.Tensor | None:
    """A linear layer by a kernel; None if nothing can compile it.

    Args:
        order: codes lie so far from the next one in the bytes: of two in a byte, sixteen even columns come before the odd ones.
    """
    functions = functions_of_kernels(KERNELS)
    if isinstance(functions, Failed):
        return None
    columns = x.shape[-1]
    flat = x.reshape(-1, 16, order).float().transpose(1, 2).contiguous()
    count = x.numel() // columns
    y = flat.new_empty(count, rows)
    functions[kernel.key](*members, rows, columns, flat, y, count, torch.get_num_threads())
    return plus(y.to(x.dtype).reshape(*x.shape[:-1], rows), bias)


def _int8(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    y = _multiplied(INT8, (values.contiguous(), scales.float()), values.shape[0], x, bias)
    return int8_linear(x, values, scales, bias) if y is None else y


def _fp8(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None) -> torch.Tensor:
    each = scales.float().expand(values.shape[0]).contiguous()
    y = _multiplied(FP8_ROWS, (values.contiguous(), each), values.shape[0], x, bias)
    return fp8_linear(x, values, scales, bias) if y is None else y


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
    parts = tuple(part.contiguous() for part in (values, scales, steps.float(), mean.float(), table.float()))
    y = _multiplied(NF4, parts, rows, x, bias, order=2)
    return nf4_linear(x, values, scales, steps, mean, table, bias, rows=rows) if y is None else y


def _int4(
    x: torch.Tensor, values: torch.Tensor, scales_and_zeros: torch.Tensor, bias: Bias = None, *, columns: int
) -> torch.Tensor:
    groups, rows, _ = scales_and_zeros.shape
    members = (values.contiguous(), scales_and_zeros.float().contiguous(), columns // groups)
    y = _multiplied(INT4, members, rows, x, bias, order=2)
    return int4_linear(x, values, scales_and_zeros, bias, columns=columns) if y is None else y


def _suits(x: torch.Tensor) -> bool:
    """A few rows on a CPU, in floats that float32 holds, of whole steps of sixty-four columns."""
    return x.device.type == "cpu" and x.dtype in FLOATS and 0 < row_count(x) <= FEW_ROWS and x.shape[-1] % 64 == 0


def _suits_bytes(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None) -> bool:
    """Where PyTorch has no kernel, which is called with less ado."""
    return _suits(x) and not suits_int8(x, values, scales, bias)


def _suits_fp8(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None) -> bool:
    return _suits(x) and values.dtype == FP8


def _suits_nf4(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    mean: torch.Tensor,
    table: torch.Tensor,
    bias: Bias = None,
    *,
    rows: int,
) -> bool:
    """Blocks of weights that end with rows."""
    return _suits(x) and x.shape[-1] % NF4_BLOCK == 0


def _suits_int4(
    x: torch.Tensor, values: torch.Tensor, scales_and_zeros: torch.Tensor, bias: Bias = None, *, columns: int
) -> bool:
    """Groups of whole steps that nothing pads."""
    groups = scales_and_zeros.shape[0]
    return _suits(x) and columns % groups == 0 and columns // groups % 64 == 0


for _linear, _run, _suited in (
    (int8_linear, _int8, _suits_bytes),
    (fp8_linear, _fp8, _suits_fp8),
    (nf4_linear, _nf4, _suits_nf4),
    (int4_linear, _int4, _suits_int4),
):
    _operator = EXECUTOR.register_operator(_run.__name__.strip("_"), like=_linear, fn=_run)
    EXECUTOR.register_implementation(_linear, _operator, checker=_suited)
