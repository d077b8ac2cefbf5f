struct Codec { // blocks of 64 codes in 32 bytes, the first of two in the upper half
    const uint8_t* values;
    const int8_t* scales;
    const float* steps;
    const float* mean;
    const float* table;
    int64_t rows, columns;
    static constexpr bool PAIRED = true;
    static constexpr float UNIT = 1.0f;
    float scale(int64_t) const { return UNIT; }
    void decode(int64_t row, int64_t column, Floats* four) const {
        const uint64_t block = uint64_t(row * columns + column) / 64;
        const float step = float(scales[block]) * steps[block / 256];
        const Floats greatest = all(step + mean[0]);
        for (int i = 0; i < 2; ++i) {
            const Codes two = codes_at(values + block * 32 + 16 * i);
            four[2 * i] = times(upper_found(two, table), greatest);
            four[2 * i + 1] = times(lower_found(two, table), greatest);
        }
    }
};
