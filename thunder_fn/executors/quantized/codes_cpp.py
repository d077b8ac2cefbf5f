"""The C++ of the executor codes: products with codes, and codes as floats.

A codec decodes sixty-four codes at a time into four vectors of sixteen floats. If two codes lie in
a byte, the first vector of thirty-two has the even columns and the second the odd ones. A shift
separates them. Three functions are made of a codec:

- `few` multiplies some rows of activations with codes that it decodes in registers, and writes
  nothing but results.
- `many` decodes sixteen rows of weights into the processor's cache and multiplies all rows of
  activations with these; in bf16, where the processor does.
- `weights` writes the weights.

int8 and int4 codes are multiplied as integers where the processor has instructions for that
(`codes_integers.py`). Nothing here needs PyTorch's headers, whose reading would take the compiler
longer than all the rest.
"""

from __future__ import annotations

from thunder_fn.executors.quantized import codes_integers
from thunder_fn.executors.quantized.codes_vectors import FRONT
from thunder_fn.executors.torchinductor.codegen import Kernel

_SCALES = """
struct Scales {  // one for each row (step 1) or for all of them (step 0)
    const void* at; int64_t step, halves;
    float operator[](int64_t row) const {
        return halves ? number(((const BFloat16*)at)[row * step]) : ((const float*)at)[row * step];
    }
};
"""

_BAND = """
constexpr int BAND = 32;  // rows of weights that a thread takes at once
"""

_INT8 = """
struct Codec {
    const int8_t* values; Scales scales; int64_t rows, columns;
    static constexpr bool PAIRED = false;
    static constexpr float UNIT = 1.0f;
    float scale(int64_t row) const { return scales[row]; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const int8_t* codes = values + row * columns + column;
        for (int i = 0; i < 4; ++i) four[i] = signed_numbers(codes_at(codes + 16 * i));
    }
#if defined(WIDE) && defined(__AVX512VNNI__)
#define INTEGERS
    static constexpr int PARTS = 1, OFFSET = 128;
    int64_t group_size() const { return columns; }
    int64_t stretch() const { return columns; }
    const int8_t* start(int64_t row) const { return values + row * columns; }
    static __m512i codes(const int8_t* at, int64_t, int) {  // unsigned, as the instruction wants one side
        return _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_set1_epi8(-128));
    }
    template <int D> void steps(const int64_t* own, const int32_t*, Floats* to) const {
        for (int r = 0; r < D; ++r) to[r] = all(scales[own[r]]);
    }
    void rests(int64_t, int64_t, const float*, float* y) const { std::fill(y, y + BAND, 0.0f); }
#endif
};
"""

_FP8 = """
struct Codec {
    const int8_t* values; Scales scales; int64_t rows, columns;
    static constexpr bool PAIRED = false;
    static constexpr float UNIT = 256.0f;
    float scale(int64_t row) const { return scales[row] * UNIT; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const int8_t* codes = values + row * columns + column;
        for (int i = 0; i < 4; ++i) four[i] = small_floats(codes_at(codes + 16 * i));
    }
};
"""

_NF4 = """
struct Codec {  // blocks of 64 codes in 32 bytes, the first of two in the upper half
    const uint8_t* values; const int8_t* scales; const float* steps; const float* mean; const float* table; int64_t rows, columns;
    static constexpr bool PAIRED = true;
    static constexpr float UNIT = 1.0f;
    float scale(int64_t) const { return UNIT; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const uint64_t block = uint64_t(row * columns + column) / 64;
        const float step = float(scales[block]) * steps[block / 256];
        const Floats greatest = all(step + mean[0]);
        for (int i = 0; i < 2; ++i) {
            const Codes two = codes_at(values + block * 32 + 16 * i);
            four[2 * i] = times(upper_found(two, table), greatest);
            four[2 * i + 1] = times(lower_found(two, table), greatest);
        }
    }
};
"""

_INT4 = """
struct Codec {  // two codes in a byte, the first in the lower half; a step and the value of code 8 for each group
    const uint8_t* values; const BFloat16* both; int64_t group, rows, columns;
    static constexpr bool PAIRED = true;
    static constexpr float UNIT = 1.0f;
    float scale(int64_t) const { return UNIT; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const uint8_t* codes = values + (row * columns + column) / 2;
        for (int i = 0; i < 2; ++i) {
            const BFloat16* own = both + 2 * ((column + 32 * i) / group * rows + row);
            const Floats step = all(number(own[0])), zero = all(number(own[1])), eight = all(-8.0f);
            const Codes two = codes_at(codes + 16 * i);
            four[2 * i] = plus(times(plus(lower_halves(two), eight), step), zero);
            four[2 * i + 1] = plus(times(plus(upper_halves(two), eight), step), zero);
        }
    }
#if defined(WIDE) && defined(__AVX512VNNI__)
#define INTEGERS
    static constexpr int PARTS = 2, OFFSET = 8;
    int64_t group_size() const { return group; }
    int64_t stretch() const { return group % 128 ? 128 : group; }  // sums of one group, or with one in each quarter of a vector
    const uint8_t* start(int64_t row) const { return values + row * (columns / 2); }
    static __m512i codes(const uint8_t* at, int64_t left, int part) {
        const __m512i two = _mm512_maskz_loadu_epi8(left < 128 ? 0xffffffff : ~uint64_t(0), at);
        return _mm512_and_si512(part ? _mm512_srli_epi16(two, 4) : two, _mm512_set1_epi8(15));
    }
    template <int D> void steps(const int64_t* own, const int32_t* groups, Floats* to) const {
        const auto pair = [&](int r, int i) {
            int32_t bits;
            std::memcpy(&bits, both + 2 * (groups[i] * rows + own[r]), 4);
            return bits;
        };
        const bool one = groups[0] == groups[3];
        const __m512i quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        _Pragma("GCC unroll 4") for (int r = 0; r < D; ++r) {
            const __m512i pairs = one ? _mm512_set1_epi32(pair(r, 0)) : _mm512_permutexvar_epi32(quarters,
                _mm512_castsi128_si512(_mm_setr_epi32(pair(r, 0), pair(r, 1), pair(r, 2), pair(r, 3))));
            to[r] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        }
    }
    void rests(int64_t from, int64_t to, const float* sums, float* y) const {  // of the values of code 8
        for (int64_t row = from; row < from + BAND; row += 16) {
            const __mmask16 inside = to - row >= 16 ? 0xffff : to > row ? (1 << (to - row)) - 1 : 0;
            Floats sum = all(0.0f);
            for (int64_t g = 0; g < columns / group; ++g) {
                const __m512i pairs = _mm512_maskz_loadu_epi32(inside, both + 2 * (g * rows + row));
                const __m512i zeros = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000));
                sum = plus_product(_mm512_castsi512_ps(zeros), all(sums[g]), sum);
            }
            store(y + row - from, sum);
        }
    }
#endif
};
"""

_FEW = """
template <typename P> struct Scratch {  // vectors in it are in one line of the cache
    std::vector<P> held;
    P* at;
    explicit Scratch(int64_t count) : held(count + 64 / sizeof(P)), at((P*)(((uintptr_t)held.data() + 63) & ~uintptr_t(63))) {}
};

template <typename T> static void arranged(const T* x, int64_t count, float* to) {  // as a codec arranges what it decodes
    for (int64_t start = 0; start < count; start += 32)
        for (int64_t i = 0; i < 32; ++i)
            to[start + (Codec::PAIRED ? i % 2 * 16 + i / 2 : i)] = number(x[start + i]);
}

template <int N, typename T>
static void few(const Codec& codec, const float* x, const T* bias, T* y, int64_t from, int64_t to) {
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
        const float scale = codec.scale(row), start = bias ? number(bias[row]) : 0.0f;
        _Pragma("GCC unroll 4") for (int n = 0; n < N; ++n)
            set(y[n * codec.rows + row],
                scale * sum_of(plus(plus(sums[n][0], sums[n][1]), plus(sums[n][2], sums[n][3]))) + start);
    }
}
"""

_WEIGHTS = """
template <typename T> static void written(const Codec& codec, int64_t row, T* to) {
    for (int64_t column = 0; column < codec.columns; column += 64, to += 64) {
        Floats four[4];
        codec.decode(row, column, four);
        if constexpr (Codec::PAIRED) {
            store_pairs(to, four[0], four[1]);
            store_pairs(to + 32, four[2], four[3]);
        } else {
            for (int i = 0; i < 4; ++i) store(to + 16 * i, Codec::UNIT == 1.0f ? four[i] : times(four[i], all(Codec::UNIT)));
        }
    }
}
"""

_MANY = """
#if defined(WIDE) && defined(__AVX512BF16__)
using Half = BFloat16;
static inline Floats plus_products(const BFloat16* a, __m512bh b, Floats sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), b);
}
static inline __m512bh whole(const BFloat16* x) { return (__m512bh)_mm512_loadu_si512(x); }
#else
using Half = float;
#endif
static inline Floats plus_products(const float* a, Floats b, Floats sum) { return plus_product(load(a), b, sum); }
static inline Floats whole(const float* x) { return load(x); }

constexpr int DECODED = 16, DOWN = 4;  // rows of weights that are decoded at once, and that are multiplied at once

// Both matrices have rows that lie `stride` apart: rows of 4096 bytes would have one another's places in the cache.
template <int N, typename P, typename T>
static void band(const Codec& codec, const P* w, const P* x, int64_t stride, const T* bias, T* y, int64_t from, int64_t to) {
    constexpr int64_t step = 64 / sizeof(P);
    for (int64_t row = from; row < to; row += DOWN, w += DOWN * stride) {
        Floats sums[N][DOWN];
        _Pragma("GCC unroll 6") for (int n = 0; n < N; ++n)
            _Pragma("GCC unroll 4") for (int r = 0; r < DOWN; ++r) sums[n][r] = all(0.0f);
        for (int64_t column = 0; column < codec.columns; column += step) {
            decltype(whole(w)) own[DOWN];
            _Pragma("GCC unroll 4") for (int r = 0; r < DOWN; ++r) own[r] = whole(w + r * stride + column);
            _Pragma("GCC unroll 6") for (int n = 0; n < N; ++n)
                _Pragma("GCC unroll 4") for (int r = 0; r < DOWN; ++r)
                    sums[n][r] = plus_products(x + n * stride + column, own[r], sums[n][r]);
        }
        const int64_t count = std::min<int64_t>(DOWN, to - row);
        float scales[DOWN] = {}, starts[DOWN] = {};
        for (int64_t r = 0; r < count; ++r) {
            scales[r] = codec.scale(row + r) / Codec::UNIT;
            if (bias) starts[r] = number(bias[row + r]);
        }
        for (int n = 0; n < N; ++n) {
            float found[DOWN];
            four_sums(sums[n], found);
            for (int r = 0; r < DOWN; ++r) found[r] = scales[r] * found[r] + starts[r];
            for (int64_t r = 0; r < count; ++r) set(y[n * codec.rows + row + r], found[r]);
        }
    }
}
"""

_MULTIPLY = """
template <typename T>
static void multiply(const Codec& codec, const T* x, const T* bias, T* y, int64_t count, int64_t threads) {
#if defined(INTEGERS)
    if (multiply_integers(codec, x, bias, y, count, threads)) return;
#endif
    using P = std::conditional_t<std::is_same_v<T, float>, float, Half>;
    const bool is_large = threads > 1 && codec.rows * codec.columns >= 1 << 16;
    if (count <= (sizeof(P) == 2 ? 2 : 4)) {  // where more, decoding once for all is worth the way through the cache
        const Scratch<float> seen(count * codec.columns);
        arranged(x, count * codec.columns, seen.at);
        #pragma omp parallel for num_threads(threads) if (is_large)
        for (int64_t from = 0; from < codec.rows; from += BAND) {
            const int64_t to = std::min<int64_t>(codec.rows, from + BAND);
            int64_t n = 0;
            const auto some = [&](auto N) {
                for (; n + N <= count; n += N)
                    few<N>(codec, seen.at + n * codec.columns, bias, y + n * codec.rows, from, to);
            };
            some(std::integral_constant<int, 4>());
            some(std::integral_constant<int, 2>());
            some(std::integral_constant<int, 1>());
        }
        return;
    }
    const int64_t stride = codec.columns + 64 / sizeof(P);
    const Scratch<P> seen(count * stride);
    for (int64_t n = 0; n < count; ++n)
        for (int64_t i = 0; i < codec.columns; ++i)
            if constexpr (std::is_same_v<T, P>) seen.at[n * stride + i] = x[n * codec.columns + i];
            else seen.at[n * stride + i] = number(x[n * codec.columns + i]);
    #pragma omp parallel num_threads(threads) if (is_large)
    {
        const Scratch<P> w(DECODED * stride);
        #pragma omp for
        for (int64_t from = 0; from < codec.rows; from += DECODED) {
            const int64_t to = std::min<int64_t>(codec.rows, from + DECODED);
            for (int64_t row = from; row < to; ++row) written(codec, row, w.at + (row - from) * stride);
            int64_t n = 0;
            const auto some = [&](auto N) {
                for (; n + N <= count; n += N)
                    band<N>(codec, w.at, seen.at + n * stride, stride, bias, y + n * codec.rows, from, to);
            };
            some(std::integral_constant<int, 6>());
            some(std::integral_constant<int, 2>());
            some(std::integral_constant<int, 1>());
        }
    }
}
"""

_ALL_WEIGHTS = """
template <typename T> static void write(const Codec& codec, T* y, int64_t threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1 && codec.rows * codec.columns >= 1 << 16)
    for (int64_t row = 0; row < codec.rows; ++row) written(codec, row, y + row * codec.columns);
}
"""

_SIZES = ("int64_t", "int64_t")
_HALVES = "const uint16_t*"
_SCALE = (
    "const void*",
    "int64_t",
    "int64_t",
)  # the members of `Scales`, whose braces may be left out
CODECS = {
    "int8": (_SCALES + _INT8, ("const int8_t*", *_SCALE, *_SIZES)),
    "fp8": (_SCALES + _FP8, ("const int8_t*", *_SCALE, *_SIZES)),
    "nf4": (
        _NF4,
        (
            "const uint8_t*",
            "const int8_t*",
            "const float*",
            "const float*",
            "const float*",
            *_SIZES,
        ),
    ),
    "int4": (_INT4, ("const uint8_t*", _HALVES, "int64_t", *_SIZES)),
}
"""The codecs, and the types of their members."""
NUMBERS = {"float32": "float", "bfloat16": "BFloat16"}


def product(codec: str, numbers: str, portable: bool = False) -> Kernel:
    """A linear layer on codes. Its arguments are the members of the codec, activations, a bias
    (or anything), whether there is one, results, the number of rows of activations, and threads.
    """
    source, members = CODECS[codec]
    type = NUMBERS[numbers]
    pointers = f"(const {type}*)x, has_bias ? (const {type}*)bias : nullptr, ({type}*)y"
    body = f"multiply<{type}>({_made(members)}, {pointers}, count, threads);"
    others = (
        "const void* x",
        "const void* bias",
        "int64_t has_bias",
        "void* y",
        "int64_t count",
        "int64_t threads",
    )
    parts = (_BAND, source, _FEW, _WEIGHTS, _MANY, codes_integers.SOURCE, _MULTIPLY)
    return _kernel(members, others, "".join(parts), body, portable)


def weights(codec: str, numbers: str, portable: bool = False) -> Kernel:
    """Codes as floats, times the scales of groups within a row: the members of the codec, then
    the results and threads.
    """
    source, members = CODECS[codec]
    type = NUMBERS[numbers]
    body = f"write<{type}>({_made(members)}, ({type}*)y, threads);"
    return _kernel(
        members,
        ("void* y", "int64_t threads"),
        _BAND + source + _WEIGHTS + _ALL_WEIGHTS,
        body,
        portable,
    )


def _made(members: tuple[str, ...]) -> str:
    """A codec of the parameters m0, m1, ..., the pointers to bf16 numbers among them as what
    they are.
    """
    names = (
        f"(const BFloat16*)m{i}" if type == _HALVES else f"m{i}" for i, type in enumerate(members)
    )
    return f"Codec{{{', '.join(names)}}}"


def _kernel(
    members: tuple[str, ...], others: tuple[str, ...], source: str, body: str, portable: bool
) -> Kernel:
    parameters = ", ".join((*(f"{type} m{i}" for i, type in enumerate(members)), *others))
    entry = f'extern "C" void kernel({parameters}) {{\n    {body}\n}}\n'
    front = "#define PORTABLE\n" if portable else "#undef PORTABLE\n"
    types = (*members, *(one.rpartition(" ")[0] for one in others))
    return Kernel(types, front + "#undef WIDE\n#undef INTEGERS\n" + FRONT + source + entry)
