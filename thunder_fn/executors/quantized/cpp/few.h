// `few` multiplies some rows of activations with codes that it decodes in registers, and writes
// nothing but results.

template <typename P> struct Scratch { // vectors in it are in one line of the cache
    std::vector<P> held;
    P* at;
    explicit Scratch(int64_t count)
        : held(count + 64 / sizeof(P)), at((P*)(((uintptr_t)held.data() + 63) & ~uintptr_t(63))) {}
};

template <typename T>
static void arranged(const T* x, int64_t count, float* to) { // as a codec arranges what it decodes
    for (int64_t start = 0; start < count; start += 32)
        for (int64_t i = 0; i < 32; ++i) to[start + (Codec::PAIRED ? i % 2 * 16 + i / 2 : i)] = number(x[start + i]);
}

template <int N, typename T>
static void few(const Codec& codec, const float* x, const T* bias, T* y, int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
        Floats sums[N][4], four[4];
        _Pragma("GCC unroll 4") for (int n = 0; n < N; ++n) _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)
            sums[n][i] = all(0.0f);
        for (int64_t column = 0; column < codec.columns; column += 64) {
            codec.decode(row, column, four);
            _Pragma("GCC unroll 4") for (int n = 0; n < N; ++n) _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)
                sums[n][i] = plus_product(four[i], load(x + n * codec.columns + column + 16 * i), sums[n][i]);
        }
        const float scale = codec.scale(row), start = bias ? number(bias[row]) : 0.0f;
        _Pragma("GCC unroll 4") for (int n = 0; n < N; ++n)
            set(y[n * codec.rows + row],
                scale * sum_of(plus(plus(sums[n][0], sums[n][1]), plus(sums[n][2], sums[n][3]))) + start);
    }
}
