#include <torch/csrc/inductor/cpp_prefix.h>

using Vec = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = Vec::size(), ROWS = 6, VECS = 4, COLS = VECS * WIDTH, DEPTH = 256, BLOCK = 80 * ROWS;

struct Tile {
    const float* left; // left[r * row + k * step]
    int64_t row, step;
    const float* right; // right[k * vecs * WIDTH + n]
    int64_t depth;
    float* out; // out[r * out_row + n]
    int64_t out_row, width;
    const float* start; // what the sums begin with
    int64_t start_row;
    bool starts; // or zero
};

template <int R, int V> static void sum_up(const Tile& t) {
    Vec sums[R][V];
    const auto count = [&](int v) { return std::clamp<int64_t>(t.width - v * WIDTH, 0, WIDTH); };
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            sums[r][v] = !t.starts ? Vec(0.0f) : Vec::loadu(t.start + r * t.start_row + v * WIDTH, count(v));
    const float* left[R];
    for (int r = 0; r < R; ++r) left[r] = t.left + r * t.row;
    const float* right = t.right;
    for (int64_t k = 0; k < t.depth; ++k) {
        Vec across[V];
        for (int v = 0; v < V; ++v) across[v] = Vec::loadu(right + v * WIDTH);
        for (int r = 0; r < R; ++r) {
            const Vec down(*left[r]);
            left[r] += t.step;
            for (int v = 0; v < V; ++v) sums[r][v] = at::vec::fmadd(down, across[v], sums[r][v]);
        }
        right += V * WIDTH;
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v].store(t.out + r * t.out_row + v * WIDTH, count(v));
}

template <int R> static void sum_up(const Tile& t, int64_t vecs) {
    return vecs == 4 ? sum_up<R, 4>(t) : vecs == 2 ? sum_up<R, 2>(t) : sum_up<R, 1>(t);
}

static void sum_up(Tile t, int64_t rows, int64_t vecs) {
    if (rows == ROWS) return sum_up<ROWS>(t, vecs);
    for (; rows >= 2; rows -= 2, t.left += 2 * t.row, t.out += 2 * t.out_row, t.start += 2 * t.start_row)
        sum_up<2>(t, vecs);
    if (rows) sum_up<1>(t, vecs);
}

struct Matrix {
    const float* at;
    int64_t row, col;
    const float* operator()(int64_t i, int64_t j) const { return at + i * row + j * col; }
};

// depth x width of a matrix, as rows of `padded` numbers, zeros behind.
static void pack_right(Matrix from, int64_t depth, int64_t width, int64_t padded, float* to) {
    if (from.col == 1) {
        for (int64_t k = 0; k < depth; ++k, to += padded)
            for (int64_t n = 0; n < padded; n += WIDTH) {
                const int64_t count = std::clamp<int64_t>(width - n, 0, WIDTH);
                Vec::loadu(from(k, n), count).store(to + n);
            }
        return;
    }
    if (width < padded) std::fill(to, to + depth * padded, 0.0f);
    int64_t k = 0;
    for (; k + WIDTH <= depth && from.row == 1; k += WIDTH) {
        int64_t n = 0;
        for (; n + WIDTH <= width; n += WIDTH)
            at::vec::transpose_mxn<float, WIDTH, WIDTH>(from(k, n), from.col, to + k * padded + n, padded);
        for (; n < width; ++n)
            for (int64_t i = k; i < k + WIDTH; ++i) to[i * padded + n] = *from(i, n);
    }
    for (; k < depth; ++k)
        for (int64_t n = 0; n < width; ++n) to[k * padded + n] = *from(k, n);
}

// rows x depth of a matrix, in bands of ROWS rows, column by column.
static void pack_left(Matrix from, int64_t rows, int64_t depth, float* to) {
    for (int64_t first = 0; first < depth; first += 16) {
        const int64_t end = std::min(first + 16, depth);
        for (int64_t m = 0; m < rows; m += ROWS) {
            const int64_t count = std::min(rows - m, ROWS);
            float* band = to + m * depth;
            if (from.row == 1)
                for (int64_t k = first; k < end; ++k) Vec::loadu(from(m, k), count).store(band + k * ROWS, count);
            else
                for (int64_t k = first; k < end; ++k)
                    for (int64_t r = 0; r < count; ++r) band[k * ROWS + r] = *from(m + r, k);
        }
    }
}

struct Product {
    Matrix left, right, start;
    bool starts;
    float* out;
    int64_t out_row, depth;
};

static float* scratch(int64_t which, int64_t count) {
    static thread_local std::vector<float> held[2];
    if (static_cast<int64_t>(held[which].size()) < count) held[which].resize(count);
    return held[which].data();
}

static void multiply(const Product& p, int64_t top, int64_t bottom, int64_t first, int64_t end) {
    const int64_t blocks = (p.depth + DEPTH - 1) / DEPTH, size = (p.depth + blocks - 1) / blocks;
    const bool packs_left = p.left.col != 1;
    float* packed_right = scratch(0, size * COLS);
    float* packed_left = packs_left ? scratch(1, BLOCK * size) : nullptr;
    for (int64_t k = 0; k < p.depth; k += size) {
        const int64_t depth = std::min(size, p.depth - k);
        for (int64_t block = top; block < bottom; block += BLOCK) {
            const int64_t below = std::min(block + BLOCK, bottom);
            if (packs_left) pack_left({p.left(block, k), p.left.row, p.left.col}, below - block, depth, packed_left);
            for (int64_t n = first; n < end; n += COLS) {
                const int64_t width = std::min(end - n, COLS), vecs = width > 2 * WIDTH ? 4 : width > WIDTH ? 2 : 1;
                pack_right({p.right(k, n), p.right.row, p.right.col}, depth, width, vecs * WIDTH, packed_right);
                for (int64_t m = block; m < below; m += ROWS) {
                    float* out = p.out + m * p.out_row + n;
                    Tile tile{packs_left ? packed_left + (m - block) * depth : p.left(m, k),
                              packs_left ? 1 : p.left.row,
                              packs_left ? ROWS : 1,
                              packed_right,
                              depth,
                              out,
                              p.out_row,
                              width,
                              out,
                              p.out_row,
                              true};
                    if (k == 0) {
                        tile.start = p.start(m, n);
                        tile.start_row = p.start.row;
                        tile.starts = p.starts;
                    }
                    sum_up(tile, std::min(below - m, ROWS), vecs);
                }
            }
        }
    }
}

// Few rows by columns that lie one after the other: each column is read once.
template <int R, int C> static void sum_few(const Product& p, int64_t m, int64_t n) {
    Vec sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = Vec(0.0f);
    const float *left[R], *right[C];
    for (int r = 0; r < R; ++r) left[r] = p.left(m + r, 0);
    for (int c = 0; c < C; ++c) right[c] = p.right(0, n + c);
    int64_t k = 0;
    for (; k + WIDTH <= p.depth; k += WIDTH) {
        Vec down[R];
        for (int r = 0; r < R; ++r) down[r] = Vec::loadu(left[r] + k);
        for (int c = 0; c < C; ++c) {
            const Vec across = Vec::loadu(right[c] + k);
            for (int r = 0; r < R; ++r) sums[r][c] = at::vec::fmadd(down[r], across, sums[r][c]);
        }
    }
    if (const int64_t count = p.depth - k)
        for (int c = 0; c < C; ++c)
            for (int r = 0; r < R; ++r)
                sums[r][c] =
                    at::vec::fmadd(Vec::loadu(left[r] + k, count), Vec::loadu(right[c] + k, count), sums[r][c]);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            const float sum = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sums[r][c]);
            p.out[(m + r) * p.out_row + n + c] = p.starts ? *p.start(m + r, n + c) + sum : sum;
        }
}

template <int C> static void sum_few(const Product& p, int64_t rows, int64_t n) {
    if (rows == 4) return sum_few<4, C>(p, 0, n);
    if (rows == 3) return sum_few<3, C>(p, 0, n);
    return rows == 2 ? sum_few<2, C>(p, 0, n) : sum_few<1, C>(p, 0, n);
}

static void multiply_few(const Product& p, int64_t rows, int64_t first, int64_t end) {
    int64_t n = first;
    for (; n + 4 <= end; n += 4) sum_few<4>(p, rows, n);
    for (; n < end; ++n) sum_few<1>(p, rows, n);
}

static int64_t parts_of(int64_t count, int64_t unit, int64_t parts) { // units in the largest of equal parts
    return ((count + unit - 1) / unit + parts - 1) / parts * unit;
}

extern "C" void kernel(const float* left, const float* right, const float* start, float* out, const int64_t rows,
                       const int64_t cols, const int64_t depth, const int64_t left_row, const int64_t left_col,
                       const int64_t right_row, const int64_t right_col, const int64_t start_row, const int64_t out_row,
                       const int64_t threads) {
    const Product p{{left, left_row, left_col},
                    {right, right_row, right_col},
                    {start, start_row, 1},
                    start_row >= 0,
                    out,
                    out_row,
                    depth};
    if (rows <= 4) {
        const int64_t team = cols * depth < (1 << 17) ? 1 : threads, width = parts_of(cols, 4, team);
        if (team == 1) return multiply_few(p, rows, 0, cols);
#pragma omp parallel num_threads(team)
        for (int64_t i = omp_get_thread_num(); i < team; i += omp_get_num_threads())
            multiply_few(p, rows, i * width, std::min((i + 1) * width, cols));
        return;
    }
    int64_t down = 1;
    const int64_t team = rows * cols * depth < (1 << 19) ? 1 : threads;
    for (int64_t tried = 1, least = INT64_MAX; tried <= team; ++tried) {
        if (team % tried) continue;
        const int64_t height = parts_of(rows, ROWS, tried), width = parts_of(cols, COLS, team / tried);
        const int64_t cost = height * width + 8 * (width + height);
        if (cost < least) least = cost, down = tried;
    }
    const int64_t height = parts_of(rows, ROWS, down), width = parts_of(cols, COLS, team / down);
    const auto part = [&](int64_t i) {
        const int64_t top = i % down * height, first = i / down * width;
        if (top < rows && first < cols)
            multiply(p, top, std::min(top + height, rows), first, std::min(first + width, cols));
    };
    if (team == 1) return part(0);
#pragma omp parallel num_threads(team)
    for (int64_t i = omp_get_thread_num(); i < team; i += omp_get_num_threads()) part(i);
}
