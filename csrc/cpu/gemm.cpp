// Tiles and strips of matrix products. The choice of tiles is measured: benchmarks/results/cpu-gemm-tiles.md.
#include "cpu/gemm.h"

#include <cblas.h>

#include <algorithm>

#include "cpu/items.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

constexpr int64_t kTileRows = 256, kTileColumns = 512;
constexpr int64_t kTilesWanted = 16;  // fewer are cut further, so that a few threads find even shares
constexpr int64_t kSmallest = 64;     // but not below so many rows or columns
constexpr int64_t kMultiple = 16;     // rows and columns of OpenBLAS' register blocks

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How many rows and columns a tile of an m x n result has.
struct Tile {
    int64_t rows, columns;

    Tile(int64_t m, int64_t n) {
        int64_t down = pieces(m, kTileRows), across = pieces(n, kTileColumns);
        while (down * across < kTilesWanted) {
            const bool can_down = pieces(m, down + 1) >= kSmallest, can_across = pieces(n, across + 1) >= kSmallest;
            if (!can_down && !can_across) break;
            if (can_down && (!can_across || pieces(m, down) >= pieces(n, across))) {
                ++down;
            } else {
                ++across;
            }
        }
        rows = pieces(pieces(m, down), kMultiple) * kMultiple;
        columns = pieces(pieces(n, across), kMultiple) * kMultiple;
    }
};

// What the product of a tile is added to goes to c first; returns the factor of c that BLAS needs.
float prepare(const Gemm& g, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    if (!g.bias && (!g.add || g.add == g.c)) return g.add ? 1.f : 0.f;
    const auto rows_of = [&](auto bias) {
        for (int64_t i = row; i < row + rows; ++i) {
            float* c = g.c + i * g.ldc + column;
            const float* add = g.add ? g.add + i * g.ld_add + column : nullptr;
            for (int64_t j = 0; j < columns; ++j) c[j] = (add ? add[j] : 0.f) + (bias ? widen(bias[column + j]) : 0.f);
        }
    };
    if (g.bias) {
        with_weights(g.bias, rows_of);
    } else {
        rows_of(static_cast<const float*>(nullptr));
    }
    return 1.f;
}

// Columns first_column .. first_column + columns of c; b points at the operand's part that gives them.
void strip(const Gemm& g, const float* b, int64_t ldb, int64_t first_column, int64_t columns, int threads) {
    const Tile tile(g.m, columns);
    const int64_t down = pieces(g.m, tile.rows), across = pieces(columns, tile.columns);
    const auto compute = [&](int64_t index) {
        const int64_t row = index % down * tile.rows, column = index / down * tile.columns;
        const int64_t m = std::min(tile.rows, g.m - row), n = std::min(tile.columns, columns - column);
        const float beta = prepare(g, row, m, first_column + column, n);
        gemm_block(g.ta, g.tb, m, n, g.k, g.alpha, g.a + (g.ta ? row : row * g.lda), g.lda,
                   b + (g.tb ? column * ldb : column), ldb, beta, g.c + row * g.ldc + first_column + column, g.ldc);
    };
    for_items(down * across, threads, [&](int64_t index, int) { compute(index); });
}

int64_t strip_columns(int64_t n, int64_t k) {
    return std::min(n,
                    std::max<int64_t>(1, kStripElements / (std::max<int64_t>(1, k) * kStripColumns)) * kStripColumns);
}

}  // namespace

int64_t gemm_scratch(int64_t n, int64_t k, DType b) { return b == DType::f32 ? 0 : strip_columns(n, k) * k; }

void gemm(const Gemm& g, float* scratch, int threads) {
    if (g.m == 0 || g.n == 0) return;
    const int64_t ldb = leading(g.b);
    if (g.b.dtype == DType::f32) {
        strip(g, g.b.as<float>(), ldb, 0, g.n, threads);
        return;
    }
    const int64_t width = strip_columns(g.n, g.k);
    for (int64_t column = 0; column < g.n; column += width) {
        const int64_t columns = std::min(width, g.n - column);
        const bf16* b = g.b.as<bf16>() + (g.tb ? column * ldb : column);
        const int64_t rows = g.tb ? columns : g.k, length = g.tb ? g.k : columns;
        for_rows(rows, length, threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) widen_row(b + r * ldb, scratch + r * length, length);
        });
        strip(g, scratch, length, column, columns, threads);
    }
}

SUROGATE_SIMD void widen_row(const bf16* in, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = widen(in[i]);
}

void gemm_block(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    scipy_cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans,
                      static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), alpha, a, static_cast<int>(lda), b,
                      static_cast<int>(ldb), beta, c, static_cast<int>(ldc));
}

}  // namespace surogate
