// Sums of products of integers, where the processor has instructions
// for these.
//
// A row of activations becomes integers of 22 or 30 bits, in steps of a power of two that its greatest
// number chooses. Those become digits from -128 to 127, three for bf16 and four for float32. Sums of
// products of digits and codes are exact within a stretch of columns that has one scale. Beside the
// rounding of float32 all that is lost are places of activations below 2 ** -22, or 2 ** -30, of the
// greatest. One instruction multiplies 64 pairs (AVX-512 VNNI), so three or four digits cost less than
// the conversion of codes to floats.
//
// A codec says how its codes lie. `codes` are 64 numbers from 0 on, too great by OFFSET. PARTS times
// as many columns lie in 64 bytes. A `stretch` of columns has the scales `steps`. `rests` holds what
// is added to all codes of a group of columns.
//
// Rows with infinities or NaN are left to floats.

#if defined(INTEGERS)
template <typename T> constexpr int PLACES = sizeof(T) + (sizeof(T) == 2); // digits
constexpr int WHOLE = 64 * Codec::PARTS;                                   // columns whose codes lie in 64 bytes

template <int P> struct Integers { // rows of activations in P digits; those of four rows in 64 columns lie together
    int64_t count, width, stretches, groups;
    Scratch<int8_t> digits;
    Scratch<int32_t>
        starts; // what the sums of a stretch of columns begin with, as codes are stored too great by OFFSET
    std::vector<float> units, sums; // the step of each row, and the sum of each group of its columns in these
    std::vector<int32_t> owners;    // the groups of the quarters of a stretch
    Integers(const Codec& codec, int64_t rows)
        : count(rows), width((codec.columns + WHOLE - 1) / WHOLE * WHOLE),
          stretches((width + codec.stretch() - 1) / codec.stretch()), groups(codec.columns / codec.group_size()),
          digits(count * P * width), starts(count * P * stretches * 16), units(count), sums(count * groups),
          owners(stretches * 4) {
        for (int64_t s = 0; s < stretches * 4; ++s)
            owners[s] = std::min(s / 4 * codec.stretch() + s % 4 * 32, codec.columns - 1) / codec.group_size();
    }
    int64_t together(int64_t n) const { return std::min<int64_t>(4, count - n / 4 * 4); }
    int8_t* digits_at(int64_t n, int64_t place) const {
        return digits.at + P * (n / 4 * 4 * width + (place / 64 * together(n) + n % 4) * 64) + place % 64;
    }
    int32_t* starts_at(int64_t n, int64_t s) const { return starts.at + (s * count + n) * P * 16; }
};

static inline int64_t digit_place(int64_t column) { // as a codec arranges codes that it takes apart
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
    for (int64_t g = 0; g < to.groups; ++g) {
        __m512 sum = all(0.0f);
        for (int64_t i = g * group; i < (g + 1) * group; i += 16) {
            const __m512 own = times(load(x + i), inverse);
            sum = plus(sum, own);
            __m512i left = _mm512_cvtps_epi32(own);
            int8_t* digits = to.digits_at(n, digit_place(i));
            for (int p = 0; p < P; ++p) {
                const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(left, 24), 24);
                _mm_storeu_si128((__m128i*)(digits + 64 * p), _mm512_cvtepi32_epi8(digit));
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
                sum = _mm512_dpbusd_epi32(sum, offset, _mm512_load_si512(to.digits_at(n, i) + 64 * p));
            _mm512_store_si512(to.starts_at(n, s) + 16 * p, _mm512_sub_epi32(zero, sum));
        }
    return true;
}

// N rows of activations from the n-th on, and D rows of codes at once: their sums stay in registers.
template <int P, int N, int D, typename T>
static void exact(const Codec& codec, const Integers<P>& x, int64_t n, const T* bias, T* y, int64_t from, int64_t to) {
    float rests[N][BAND]; // of bands that are not full too
    for (int i = 0; i < N; ++i) codec.rests(from, to, x.sums.data() + (n + i) * x.groups, rests[i]);
    const int64_t stretch = codec.stretch(), apart = x.together(n) * P * 64;
    for (int64_t row = from; row < to; row += D) {
        int64_t rows[D];
        decltype(codec.start(0)) codes[D];
        Floats results[N * D];
        for (int r = 0; r < D; ++r) {
            rows[r] = std::min(row + r, to - 1);
            codes[r] = codec.start(rows[r]);
        }
        for (int i = 0; i < N * D; ++i) results[i] = all(0.0f);
        for (int64_t s = 0; s < x.stretches; ++s) {
            __m512i sums[N * P][D];
            const int32_t* starts = x.starts_at(n, s);
            _Pragma("GCC unroll 16") for (int k = 0; k < N * P; ++k) _Pragma("GCC unroll 4") for (int r = 0; r < D; ++r)
                sums[k][r] = _mm512_load_si512(starts + 16 * k);
            const int8_t* digits = x.digits_at(n, s * stretch);
            const auto multiplied = [&](uint64_t column, int64_t left) {
                _Pragma("GCC unroll 2") for (int part = 0; part < Codec::PARTS; ++part, digits += apart) {
                    __m512i own[D];
                    _Pragma("GCC unroll 4") for (int r = 0; r < D; ++r) own[r] =
                        codec.codes(codes[r] + column / Codec::PARTS, left, part);
                    _Pragma("GCC unroll 16") for (int k = 0; k < N * P; ++k) {
                        const __m512i digit = _mm512_load_si512(digits + 64 * k);
                        _Pragma("GCC unroll 4") for (int r = 0; r < D; ++r) sums[k][r] =
                            _mm512_dpbusd_epi32(sums[k][r], own[r], digit);
                    }
                }
            };
            const uint64_t end = std::min<uint64_t>((s + 1) * stretch, codec.columns);
            uint64_t column = s * stretch;
            for (; column + WHOLE <= end; column += WHOLE) multiplied(column, WHOLE);
            if (column < end) multiplied(column, end - column);
            Floats steps[D];
            codec.template steps<D>(rows, x.owners.data() + 4 * s, steps);
            _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) _Pragma("GCC unroll 4") for (int r = 0; r < D; ++r) {
                Floats sum = _mm512_cvtepi32_ps(sums[i * P + P - 1][r]);
                _Pragma("GCC unroll 4") for (int k = i * P + P - 2; k >= i * P; --k) sum =
                    plus_product(sum, all(256.0f), _mm512_cvtepi32_ps(sums[k][r]));
                results[i * D + r] = plus_product(sum, steps[r], results[i * D + r]);
            }
        }
        float found[N * D];
        for (int i = 0; i < N * D; i += 4) four_sums(results + i, found + i);
        for (int i = 0; i < N; ++i)
            for (int64_t r = 0; r < std::min<int64_t>(D, to - row); ++r)
                set(y[(n + i) * codec.rows + row + r], (found[i * D + r] + rests[i][row + r - from]) * x.units[n + i] +
                                                           (bias ? number(bias[row + r]) : 0.0f));
    }
}

template <typename T>
static bool multiply_integers(const Codec& codec, const T* x, const T* bias, T* y, int64_t count, int64_t threads) {
    constexpr int P = PLACES<T>;
    if (codec.columns > 1 << 16) return false;                            // sums of more products may be beyond 2 ** 31
    if (count > (P == 3 && codec.stretch() > 128 ? 32 : 8)) return false; // products of floats are faster
    Integers<P> seen(codec, count);
    const Scratch<float> row(codec.columns);
    for (int64_t n = 0; n < count; ++n) {
        arranged(x + n * codec.columns, codec.columns, row.at);
        if (!integers_of(codec, row.at, n, seen)) return false;
    }
#pragma omp parallel for num_threads(threads) if (threads > 1 && codec.rows * codec.columns >= 1 << 16)
    for (int64_t from = 0; from < codec.rows; from += BAND) {
        const int64_t to = std::min<int64_t>(codec.rows, from + BAND);
        int64_t n = 0;
        for (; n + 4 <= count; n += 4) exact<P, 4, 1>(codec, seen, n, bias, y, from, to);
        for (; n + 2 <= count; n += 2) exact<P, 2, 2>(codec, seen, n, bias, y, from, to);
        for (; n < count; ++n) exact<P, 1, 4>(codec, seen, n, bias, y, from, to);
    }
    return true;
}
#endif
