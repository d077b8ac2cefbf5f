// Sixteen floats, sixteen codes, and bf16 numbers; by AVX-512, or by loops for any processor.

struct BFloat16 {
    uint16_t bits;
};
static inline float number(float x) { return x; }
static inline float number(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
static inline void set(float& y, float x) { y = x; }
static inline void set(BFloat16& y, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(PORTABLE)
#define WIDE
using Floats = __m512;
using Codes = __m128i;
static inline Floats all(float x) { return _mm512_set1_ps(x); }
static inline Floats load(const float* x) { return _mm512_loadu_ps(x); }
static inline Floats load(const BFloat16* x) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
static inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
static inline Floats plus_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
static inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
#if defined(__AVX512BF16__)
static inline __m512i rounded(Floats x) { // to bf16, in the lower halves
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
}
#else
static inline __m512i rounded(Floats x) {
    const __m512i bits = _mm512_castps_si512(x),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}
#endif
static inline void store(float* y, Floats x) { _mm512_storeu_ps(y, x); }
static inline void store(BFloat16* y, Floats x) { _mm256_storeu_si256((__m256i*)y, _mm512_cvtepi32_epi16(rounded(x))); }
static inline void store_pairs(float* y, Floats even, Floats odd) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    store(y, _mm512_permutex2var_ps(even, first, odd));
    store(y + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd));
}
static inline void store_pairs(BFloat16* y, Floats even, Floats odd) {
    _mm512_storeu_si512(y, _mm512_or_si512(rounded(even), _mm512_slli_epi32(rounded(odd), 16)));
}
static inline void four_sums(const Floats* x, float* y) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 d = _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1)));
}
static inline Codes codes_at(const void* x) { return _mm_loadu_si128((const __m128i*)x); }
static inline Floats signed_numbers(Codes x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
static inline Floats lower_halves(Codes x) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_cvtepu8_epi32(x), _mm512_set1_epi32(15)));
}
static inline Floats upper_halves(Codes x) { return _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(x), 4)); }
static inline Floats lower_found(Codes x, const float* table) { // the lowest four bits count
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(x), load(table));
}
static inline Floats upper_found(Codes x, const float* table) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(x), 4), load(table));
}
static inline Floats small_floats(Codes x) { // e4m3 / 256: the bits of a half whose exponent is 8 less
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
    return _mm512_cvtph_ps(_mm256_andnot_si256(_mm256_set1_epi16(1 << 14), wide));
}
#else
struct Floats {
    float each[16];
};
struct Codes {
    uint8_t each[16];
};
template <typename F> static inline Floats made(F f) {
    Floats y;
    for (int i = 0; i < 16; ++i) y.each[i] = f(i);
    return y;
}
static inline Floats all(float x) {
    return made([&](int) { return x; });
}
template <typename T> static inline Floats load(const T* x) {
    return made([&](int i) { return number(x[i]); });
}
static inline Floats times(Floats a, Floats b) {
    return made([&](int i) { return a.each[i] * b.each[i]; });
}
static inline Floats plus(Floats a, Floats b) {
    return made([&](int i) { return a.each[i] + b.each[i]; });
}
static inline Floats plus_product(Floats a, Floats b, Floats sum) {
#if defined(__FMA__) || defined(__aarch64__)
    return made([&](int i) { return __builtin_fmaf(a.each[i], b.each[i], sum.each[i]); });
#else
    return made([&](int i) { return a.each[i] * b.each[i] + sum.each[i]; });
#endif
}
static inline float sum_of(Floats x) {
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) x.each[i] += x.each[i + width];
    return x.each[0];
}
static inline void four_sums(const Floats* x, float* y) {
    for (int i = 0; i < 4; ++i) y[i] = sum_of(x[i]);
}
template <typename T> static inline void store(T* y, Floats x) {
    for (int i = 0; i < 16; ++i) set(y[i], x.each[i]);
}
template <typename T> static inline void store_pairs(T* y, Floats even, Floats odd) {
    for (int i = 0; i < 16; ++i) set(y[2 * i], even.each[i]), set(y[2 * i + 1], odd.each[i]);
}
static inline Codes codes_at(const void* x) {
    Codes y;
    std::memcpy(&y, x, 16);
    return y;
}
static inline Floats signed_numbers(Codes x) {
    return made([&](int i) { return float(int8_t(x.each[i])); });
}
static inline Floats lower_halves(Codes x) {
    return made([&](int i) { return float(x.each[i] & 15); });
}
static inline Floats upper_halves(Codes x) {
    return made([&](int i) { return float(x.each[i] >> 4); });
}
static inline Floats lower_found(Codes x, const float* table) {
    return made([&](int i) { return table[x.each[i] & 15]; });
}
static inline Floats upper_found(Codes x, const float* table) {
    return made([&](int i) { return table[x.each[i] >> 4]; });
}
static inline Floats small_floats(Codes x) { // e4m3 / 256: the bits of a float whose exponent is 120 less
    Floats y;
    for (int i = 0; i < 16; ++i) {
        const uint32_t bits = (uint32_t(int32_t(int8_t(x.each[i]))) << 20) & 0x87ffffffu;
        std::memcpy(&y.each[i], &bits, 4);
    }
    return times(y, all(0x1p112f));
}
#endif

constexpr int BAND = 32; // rows of weights that a thread takes at once
