struct Codec {
    const int8_t* values;
    Scales scales;
    int64_t rows, columns;
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
    static __m512i codes(const int8_t* at, int64_t, int) { // unsigned, as the instruction wants one side
        return _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_set1_epi8(-128));
    }
    template <int D> void steps(const int64_t* own, const int32_t*, Floats* to) const {
        for (int r = 0; r < D; ++r) to[r] = all(scales[own[r]]);
    }
    void rests(int64_t, int64_t, const float*, float* y) const { std::fill(y, y + BAND, 0.0f); }
#endif
};
