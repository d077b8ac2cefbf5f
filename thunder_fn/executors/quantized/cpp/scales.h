struct Scales { // one for each row (step 1) or for all of them (step 0)
    const void* at;
    int64_t step, halves;
    float operator[](int64_t row) const {
        return halves ? number(((const BFloat16*)at)[row * step]) : ((const float*)at)[row * step];
    }
};
