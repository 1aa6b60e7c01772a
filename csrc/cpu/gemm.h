// Matrix products in tiles that depend on the shape alone: OpenBLAS with one thread inside a tile, threads over tiles.
// So results are the same bits for every number of threads. All matrices are row-major.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "cpu/bf16.h"

namespace surogate {

// c[m,n] = alpha * op(a) op(b) + add + bias.
struct Gemm {
    int64_t m, n, k;
    float alpha;
    const float* a;  // [m,k], or [k,m] if ta
    int64_t lda;     // elements from row to row, as all ld's
    bool ta;
    Tensor b;  // [k,n], or [n,k] if tb; f32 or bf16
    bool tb;
    float* c;
    int64_t ldc;
    const float* add;  // [m,n]; null: nothing. May be c.
    int64_t ld_add;
    Tensor bias;  // [n], f32 or bf16; no data: nothing
};

// A bf16 operand b is widened strip by strip: so many elements at most, in whole multiples of so many columns of c.
constexpr int64_t kStripElements = int64_t{1} << 24;
constexpr int64_t kStripColumns = 512;

// Elements of f32 scratch that gemm() needs for b of that type.
int64_t gemm_scratch(int64_t n, int64_t k, DType b);

void gemm(const Gemm& g, float* scratch, int threads);

// c = alpha * op(a) op(b) + beta * c by the calling thread alone.
void gemm_block(bool ta, bool tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

// out[0..n) = in[0..n).
void widen_row(const bf16* in, float* out, int64_t n);

// Elements from row to row of a matrix, as BLAS takes it.
inline int64_t leading(const Tensor& t) {
    const int64_t columns = t.dim(1) > 1 ? t.dim(1) : 1;
    return t.dim(0) > 1 && t.stride[0] > columns ? t.stride[0] : columns;
}

}  // namespace surogate
