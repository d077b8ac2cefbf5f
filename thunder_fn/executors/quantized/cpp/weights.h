template <typename T> static void written(const Codec& codec, int64_t row, T* to) {
    for (int64_t column = 0; column < codec.columns; column += 64, to += 64) {
        Floats four[4];
        codec.decode(row, column, four);
        if constexpr (Codec::PAIRED) {
            store_pairs(to, four[0], four[1]);
            store_pairs(to + 32, four[2], four[3]);
        } else {
            for (int i = 0; i < 4; ++i)
                store(to + 16 * i, Codec::UNIT == 1.0f ? four[i] : times(four[i], all(Codec::UNIT)));
        }
    }
}
