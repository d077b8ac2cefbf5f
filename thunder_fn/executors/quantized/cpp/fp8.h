struct Codec {
    const int8_t* values;
    Scales scales;
    int64_t rows, columns;
    static constexpr bool PAIRED = false;
    static constexpr float UNIT = 256.0f;
    float scale(int64_t row) const { return scales[row] * UNIT; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const int8_t* codes = values + row * columns + column;
        for (int i = 0; i < 4; ++i) four[i] = small_floats(codes_at(codes + 16 * i));
    }
};
