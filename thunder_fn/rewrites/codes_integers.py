"""The C++ of the executor codes: sums of products of integers, where the processor has instructions for these.

A row of activations becomes integers of 22 or 30 bits, in steps of a power of two that its greatest number chooses, and those
become digits from -128 to 127, three for bf16 and four for float32. Sums of products of digits and codes are exact within a
stretch of columns that has one scale, so that all that is lost beside the rounding of float32 are places of activations below
2 ** -22, or 2 ** -30, of the greatest. One instruction multiplies 64 pairs (AVX-512 VNNI), so three or four digits cost less than
the conversion of codes to floats.

A codec says how its codes lie: `codes` are 64 numbers from 0 on, too great by OFFSET; PARTS times as many columns lie in 64
bytes; a `stretch` of columns has the scales `steps`; what is added to all codes of a group of columns counts in `rests`.

Rows with infinities or NaN are left to floats.
"""

from __future__ import annotations

SOURCE = """
#if defined(INTEGERS)
template <typename T> constexpr int PLACES = sizeof(T) + (sizeof(T) == 2);  // digits
constexpr int WHOLE = 64 * Codec::PARTS;  // columns whose codes lie in 64 bytes

template <int P> struct Integers {  // rows of activations, P rows of digits for each
    int64_t width, stretches, groups;
    Scratch<int8_t> digits;
    Scratch<int32_t> starts;  // what the sums of a stretch of columns begin with, as codes are stored too great by OFFSET
    std::vector<float> units, sums;  // the step of each row, and the sum of each group of its columns in these
    std::vector<int32_t> owners;  // the groups of the quarters of a stretch
    Integers(const Codec& codec, int64_t count)
        : width((codec.columns + WHOLE - 1) / WHOLE * WHOLE), stretches((width + codec.stretch() - 1) / codec.stretch()),
          groups(codec.columns / codec.group_size()), digits(count * P * width), starts(count * P * stretches * 16), units(count),
          sums(count * groups), owners(stretches * 4) {
        for (int64_t s = 0; s < stretches * 4; ++s)
            owners[s] = std::min(s / 4 * codec.stretch() + s % 4 * 32, codec.columns - 1) / codec.group_size();
    }
};

static inline int64_t digit_place(int64_t column) {  // as a codec arranges codes that it takes apart
    return Codec::PARTS == 1 ? column : column / 128 * 128 + column / 16 % 2 * 64 + column % 128 / 32 * 16;
}

template <int P> static bool integers_of(const Codec& codec, const float* x, int64_t n, Integers<P>& to) {
    const int64_t columns = codec.columns, group = codec.group_size();
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
    to.units[n] = std::ldexp(1.0f, exponent - bits);
    const __m512 inverse = all(std::ldexp(1.0f, bits - exponent));
    int8_t* digits = to.digits.at + n * P * to.width;
    for (int64_t g = 0; g < to.groups; ++g) {
        __m512 sum = all(0.0f);
        for (int64_t i = g * group; i < (g + 1) * group; i += 16) {
            const __m512 own = times(load(x + i), inverse);
            sum = plus(sum, own);
            __m512i left = _mm512_cvtps_epi32(own);
            for (int p = 0; p < P; ++p) {
                const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(left, 24), 24);
                _mm_storeu_si128((__m128i*)(digits + p * to.width + digit_place(i)), _mm512_cvtepi32_epi8(digit));
                left = _mm512_srai_epi32(_mm512_sub_epi32(left, digit), 8);
            }
        }
        to.sums[n * to.groups + g] = sum_of(sum);
    }
    const __m512i offset = _mm512_set1_epi8(char(Codec::OFFSET)), zero = _mm512_setzero_si512();
    for (int64_t s = 0; s < to.stretches; ++s)
        for (int p = 0; p < P; ++p) {
            __m512i sum = zero;
            for (int64_t i = s * codec.stretch(); i < std::min((s + 1) * codec.stretch(), to.width); i += 64)
                sum = _mm512_dpbusd_epi32(sum, offset, _mm512_load_si512(digits + p * to.width + i));
            _mm512_store_si512(to.starts.at + ((n * to.stretches + s) * P + p) * 16, _mm512_sub_epi32(zero, sum));
        }
    return true;
}

template <int P, typename T>
static void exact(const Codec& codec, const Integers<P>& x, int64_t n, const T* bias, T* y, int64_t from, int64_t to) {
    float rests[BAND];  // of bands that are not full too
    codec.rests(from, to, x.sums.data() + n * x.groups, rests);
    const int64_t stretch = codec.stretch();
    for (int64_t row = from; row < to; row += 4) {
        int64_t rows[4];
        decltype(codec.start(0)) codes[4];
        Floats results[4];
        for (int r = 0; r < 4; ++r) {
            rows[r] = std::min(row + r, to - 1);
            codes[r] = codec.start(rows[r]);
            results[r] = all(0.0f);
        }
        const int8_t* digits = x.digits.at + n * P * x.width;
        for (int64_t s = 0; s < x.stretches; ++s) {
            __m512i sums[P][4];
            _Pragma("GCC unroll 4") for (int k = 0; k < P; ++k)
                _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r)
                    sums[k][r] = _mm512_load_si512(x.starts.at + ((n * x.stretches + s) * P + k) * 16);
            for (uint64_t column = s * stretch; column < std::min<uint64_t>((s + 1) * stretch, x.width); column += WHOLE) {
                _Pragma("GCC unroll 2") for (int part = 0; part < Codec::PARTS; ++part) {
                    __m512i own[4];
                    _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r)
                        own[r] = codec.codes(codes[r] + column / Codec::PARTS, codec.columns - int64_t(column), part);
                    _Pragma("GCC unroll 4") for (int k = 0; k < P; ++k) {
                        const __m512i digit = _mm512_load_si512(digits + k * x.width + column + 64 * part);
                        _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r)
                            sums[k][r] = _mm512_dpbusd_epi32(sums[k][r], own[r], digit);
                    }
                }
            }
            Floats steps[4];
            codec.steps(rows, x.owners.data() + 4 * s, steps);
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; ++r) {
                Floats sum = _mm512_cvtepi32_ps(sums[P - 1][r]);
                _Pragma("GCC unroll 4") for (int k = P - 2; k >= 0; --k)
                    sum = plus_product(sum, all(256.0f), _mm512_cvtepi32_ps(sums[k][r]));
                results[r] = plus_product(sum, steps[r], results[r]);
            }
        }
        float found[4];
        four_sums(results, found);
        for (int64_t r = 0; r < std::min<int64_t>(4, to - row); ++r)
            set(y[n * codec.rows + row + r],
                (found[r] + rests[row + r - from]) * x.units[n] + (bias ? number(bias[row + r]) : 0.0f));
    }
}

template <typename T>
static bool multiply_integers(const Codec& codec, const T* x, const T* bias, T* y, int64_t count, int64_t threads) {
    constexpr int P = PLACES<T>;
    if (codec.columns > 1 << 16) return false;  // sums of more products may be beyond 2 ** 31
    if (count > (P == 3 && codec.stretch() > 128 ? 32 : 8)) return false;  // products of floats are faster
    Integers<P> seen(codec, count);
    const Scratch<float> row(codec.columns);
    for (int64_t n = 0; n < count; ++n) {
        arranged(x + n * codec.columns, codec.columns, row.at);
        if (!integers_of(codec, row.at, n, seen)) return false;
    }
    #pragma omp parallel for num_threads(threads) if (threads > 1 && codec.rows * codec.columns >= 1 << 16)
    for (int64_t from = 0; from < codec.rows; from += BAND) {
        const int64_t to = std::min<int64_t>(codec.rows, from + BAND);
        for (int64_t n = 0; n < count; ++n) exact(codec, seen, n, bias, y, from, to);
    }
    return true;
}
#endif
"""
