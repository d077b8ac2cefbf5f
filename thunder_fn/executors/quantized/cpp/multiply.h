template <typename T>
static void multiply(const Codec& codec, const T* x, const T* bias, T* y, int64_t count, int64_t threads) {
#if defined(INTEGERS)
    if (multiply_integers(codec, x, bias, y, count, threads)) return;
#endif
    using P = std::conditional_t<std::is_same_v<T, float>, float, Half>;
    const bool is_large = threads > 1 && codec.rows * codec.columns >= 1 << 16;
    if (count <= (sizeof(P) == 2 ? 2 : 4)) { // where more, decoding once for all is worth the way through the cache
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
            if constexpr (std::is_same_v<T, P>)
                seen.at[n * stride + i] = x[n * codec.columns + i];
            else
                seen.at[n * stride + i] = number(x[n * codec.columns + i]);
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
