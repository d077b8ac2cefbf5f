"""The C++ of the executor codes for int8 weights: sums of products of integers, where the processor has instructions for these.

A row of activations becomes integers of 22 or 30 bits, in steps of a power of two that its greatest number chooses, and those
become digits from -128 to 127, three for bf16 and four for float32. Sums of products of digits and codes are exact, so all that
is lost are places of activations below 2 ** -22, or 2 ** -30, of the greatest. One instruction multiplies 64 pairs (AVX-512
VNNI), so three or four digits cost less than the conversion of codes to floats: one core of an EPYC 9004 multiplies a row of
bf16 numbers with 2048 x 2048 codes in 104 us, PyTorch's kernel in 235.

Rows with infinities or NaN are left to floats.
"""

from __future__ import annotations

SOURCE = """
#if defined(WIDE) && defined(__AVX512VNNI__)
#define INTEGERS
template <typename T> constexpr int PLACES = sizeof(T) + (sizeof(T) == 2);  // digits

template <int P> struct Integers {  // `count` rows of activations, P rows of digits for each
    std::vector<int8_t> held;
    std::vector<float> steps;
    std::vector<int64_t> sums;  // 128 times the sum of each row of digits
    int8_t* at;
    Integers(int64_t count, int64_t columns)
        : held(count * P * columns + 64), steps(count), sums(count * P),
          at((int8_t*)(((uintptr_t)held.data() + 63) & ~uintptr_t(63))) {}
};

template <int P, typename T> static bool integers_of(const T* x, int64_t columns, int64_t n, Integers<P>& to) {
    __m512 greatest = all(0.0f);
    __mmask16 finite = 0xffff;
    for (int64_t i = 0; i < columns; i += 16) {
        const __m512 size = _mm512_abs_ps(load(x + i));
        finite &= _mm512_cmp_ps_mask(size, all(3.4028235e38f), _CMP_LE_OQ);
        greatest = _mm512_max_ps(greatest, size);
    }
    if (finite != 0xffff) return false;
    constexpr int bits = 8 * P - 2;
    int exponent;
    std::frexp(_mm512_reduce_max_ps(greatest), &exponent);
    exponent = std::max(exponent, bits - 126);
    to.steps[n] = std::ldexp(1.0f, exponent - bits);
    const __m512 inverse = all(std::ldexp(1.0f, bits - exponent));
    __m512i sums[P];
    for (int p = 0; p < P; ++p) sums[p] = _mm512_setzero_si512();
    for (int64_t i = 0; i < columns; i += 16) {
        __m512i left = _mm512_cvtps_epi32(times(load(x + i), inverse));
        for (int p = 0; p < P; ++p) {
            const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(left, 24), 24);
            _mm_storeu_si128((__m128i*)(to.at + (n * P + p) * columns + i), _mm512_cvtepi32_epi8(digit));
            sums[p] = _mm512_add_epi32(sums[p], digit);
            left = _mm512_srai_epi32(_mm512_sub_epi32(left, digit), 8);
        }
    }
    for (int p = 0; p < P; ++p) to.sums[n * P + p] = 128 * int64_t(_mm512_reduce_add_epi32(sums[p]));
    return true;
}

static inline void four_sums(const __m512i* x, int32_t* y) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    _mm_storeu_si128((__m128i*)y, _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1)));
}

template <int P, typename T>
static void exact(const Codec& codec, const Integers<P>& x, int64_t n, const T* bias, T* y, int64_t from, int64_t to) {
    const __m512i top = _mm512_set1_epi8(-128);  // codes plus 128 are unsigned, as the instruction wants one side
    for (int64_t row = from; row < to; row += 4) {
        const int8_t* codes[4];
        for (int r = 0; r < 4; ++r) codes[r] = codec.values + std::min(row + r, to - 1) * codec.columns;
        const int8_t* digits = x.at + n * P * codec.columns;
        __m512i sums[P][4];
        _Pragma("GCC unroll 4") for (int k = 0; k < P; ++k)
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r) sums[k][r] = _mm512_setzero_si512();
        for (int64_t column = 0; column < codec.columns; column += 64) {
            __m512i own[4];
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r)
                own[r] = _mm512_xor_si512(_mm512_loadu_si512(codes[r] + column), top);
            _Pragma("GCC unroll 4") for (int k = 0; k < P; ++k) {
                const __m512i digit = _mm512_loadu_si512(digits + k * codec.columns + column);
                _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r)
                    sums[k][r] = _mm512_dpbusd_epi32(sums[k][r], own[r], digit);
            }
        }
        int64_t total[4] = {};
        for (int p = P - 1; p >= 0; --p) {
            int32_t found[4];
            four_sums(sums[p], found);
            for (int r = 0; r < 4; ++r) total[r] = total[r] * 256 + found[r] - x.sums[n * P + p];
        }
        for (int64_t r = 0; r < std::min<int64_t>(4, to - row); ++r)
            set(y[n * codec.rows + row + r],
                float(total[r]) * x.steps[n] * codec.scale(row + r) + (bias ? number(bias[row + r]) : 0.0f));
    }
}

template <typename T>
static bool multiply_integers(const Codec& codec, const T* x, const T* bias, T* y, int64_t count, int64_t threads) {
    constexpr int P = PLACES<T>;
    if (codec.columns > 1 << 16) return false;  // sums of more products may be beyond 2 ** 31
    if (count > (P == 3 ? 6 : 8)) return false;  // products of floats are faster
    Integers<P> seen(count, codec.columns);
    for (int64_t n = 0; n < count; ++n)
        if (!integers_of(x + n * codec.columns, codec.columns, n, seen)) return false;
    #pragma omp parallel for num_threads(threads) if (threads > 1 && codec.rows * codec.columns >= 1 << 16)
    for (int64_t from = 0; from < codec.rows; from += 32) {
        const int64_t to = std::min<int64_t>(codec.rows, from + 32);
        for (int64_t n = 0; n < count; ++n) exact(codec, seen, n, bias, y, from, to);
    }
    return true;
}
#endif
"""
