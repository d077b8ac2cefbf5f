struct Codec { // two codes in a byte, the first in the lower half; a step and the value of code 8 for each group
    const uint8_t* values;
    const BFloat16* both;
    int64_t group, rows, columns;
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
    int64_t stretch() const {
        return group % 128 ? 128 : group;
    } // sums of one group, or with one in each quarter of a vector
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
            const __m512i pairs =
                one ? _mm512_set1_epi32(pair(r, 0))
                    : _mm512_permutexvar_epi32(quarters, _mm512_castsi128_si512(_mm_setr_epi32(
                                                             pair(r, 0), pair(r, 1), pair(r, 2), pair(r, 3))));
            to[r] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        }
    }
    void rests(int64_t from, int64_t to, const float* sums, float* y) const { // of the values of code 8
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
