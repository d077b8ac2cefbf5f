template <typename T> static void write(const Codec& codec, T* y, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && codec.rows * codec.columns >= 1 << 16)
    for (int64_t row = 0; row < codec.rows; ++row) written(codec, row, y + row * codec.columns);
}
