#include <torch/csrc/inductor/cpp_prefix.h>
#include <cstring>

// While a loop runs, other threads may; now and then it looks whether its user wants it to end.
struct Running {
    PyThreadState* state = PyEval_SaveThread();
    ~Running() { PyEval_RestoreThread(state); }
    bool interrupted(int64_t n) {
        if ((n & 0xffff) != 0xffff) return false;
        PyEval_RestoreThread(state);
        const bool found = PyErr_CheckSignals() != 0;
        state = PyEval_SaveThread();
        return found;
    }
};

template <typename T>
static void multiply(int64_t gemm, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t a0, int64_t a1,
                     const T* b, int64_t b0, int64_t b1, T beta, T* c, int64_t ldc) {
    using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*,
                          const T*, const int*, const T*, T*, const int*);
    const bool at = a1 != 1, bt = b1 != 1;
    const int M = m, N = n, K = k, lda = at ? a1 : a0, ldb = bt ? b1 : b0, ld = ldc;
    reinterpret_cast<Gemm>(gemm)(bt ? "T" : "N", at ? "T" : "N", &N, &M, &K, &alpha, b, &ldb, a, &lda, &beta, c, &ld);
}

template <typename T> static void fill(const T* from, int64_t s0, int64_t s1, T* to, int64_t ld, int64_t m, int64_t n) {
    if (from == to) return;
    for (int64_t i = 0; i < m; ++i) {
        if (s1 == 1)
            std::memcpy(to + i * ld, from + i * s0, n * sizeof(T));
        else
            for (int64_t j = 0; j < n; ++j) to[i * ld + j] = from[i * s0 + j * s1];
    }
}

// Small products whose right side lies in rows: BLAS takes longer to begin than these take.
template <typename T, int64_t N, int64_t K, int64_t R, int64_t C>
static inline void block(const T* a, int64_t lda, const T* b, int64_t ldb, bool add, T alpha, T* c, int64_t ldc) {
    using Vec = at::vec::Vectorized<T>;
    Vec sums[R][C];
    for (int64_t r = 0; r < R; ++r)
        for (int64_t j = 0; j < C; ++j) sums[r][j] = Vec(T(0));
    for (int64_t k = 0; k < K; ++k) {
        Vec row[C];
        for (int64_t j = 0; j < C; ++j) row[j] = Vec::loadu(b + k * ldb + j * Vec::size());
        for (int64_t r = 0; r < R; ++r) {
            const Vec x(a[r * lda + k]);
            for (int64_t j = 0; j < C; ++j) sums[r][j] = at::vec::fmadd(x, row[j], sums[r][j]);
        }
    }
    for (int64_t r = 0; r < R; ++r)
        for (int64_t j = 0; j < C; ++j) {
            T* to = c + r * ldc + j * Vec::size();
            auto value = sums[r][j] * Vec(alpha);
            if (add) value = value + Vec::loadu(to);
            value.store(to);
        }
}

template <typename T, int64_t M, int64_t N, int64_t K>
static void multiply_small(const T* a, int64_t lda, const T* b, int64_t ldb, bool add, T alpha, T* c, int64_t ldc) {
    constexpr int64_t V = at::vec::Vectorized<T>::size(), C = N % (2 * V) ? 1 : 2, R = 4;
    for (int64_t j = 0; j < N; j += C * V) {
        int64_t i = 0;
        for (; i + R <= M; i += R) block<T, N, K, R, C>(a + i * lda, lda, b + j, ldb, add, alpha, c + i * ldc + j, ldc);
        for (; i < M; ++i) block<T, N, K, 1, C>(a + i * lda, lda, b + j, ldb, add, alpha, c + i * ldc + j, ldc);
    }
}
