// `many` rows of activations: sixteen rows of weights are decoded into the processor's cache and
// multiplied with all of them; in bf16, where the processor does.

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

constexpr int DECODED = 16, DOWN = 4; // rows of weights that are decoded at once, and that are multiplied at once

// Both matrices have rows that lie `stride` apart: rows of 4096 bytes would have one another's places in the cache.
template <int N, typename P, typename T>
static void band(const Codec& codec, const P* w, const P* x, int64_t stride, const T* bias, T* y, int64_t from,
                 int64_t to) {
    constexpr int64_t step = 64 / sizeof(P);
    for (int64_t row = from; row < to; row += DOWN, w += DOWN * stride) {
        Floats sums[N][DOWN];
        _Pragma("GCC unroll 6") for (int n = 0; n < N; ++n) _Pragma("GCC unroll 4") for (int r = 0; r < DOWN; ++r)
            sums[n][r] = all(0.0f);
        for (int64_t column = 0; column < codec.columns; column += step) {
            decltype(whole(w)) own[DOWN];
            _Pragma("GCC unroll 4") for (int r = 0; r < DOWN; ++r) own[r] = whole(w + r * stride + column);
            _Pragma("GCC unroll 6") for (int n = 0; n < N; ++n) _Pragma("GCC unroll 4") for (int r = 0; r < DOWN; ++r)
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
