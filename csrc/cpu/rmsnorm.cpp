// rmsnorm, add_rmsnorm and their backward pass (surogate/ops/rmsnorm.py).
#include <cmath>
#include <cstring>

#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/reduce.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

// y = w * x * rstd; returns rstd. y may be x.
template <typename W>
SUROGATE_SIMD float normalise_row(const float* x, const W* w, float* y, int64_t n, float eps) {
    const float sum = lane_sum<float>(n, [&](int64_t i) { return x[i] * x[i]; });
    const float rstd = 1.f / std::sqrt(sum / static_cast<float>(n) + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * rstd * widen(w[i]);
    return rstd;
}

void rmsnorm(const Call& call) {
    const Tensor &x = call.in[0], &w = call.in[1], &y = call.out[0], &rstd = call.out[1];
    const int64_t n = x.dim(-1);
    const float eps = static_cast<float>(call.attrs.real("eps"));
    const RowOffsets at_x(x), at_y(y), at_rstd(rstd, 0);
    with_weights(w, [&](const auto* weights) {
        for_rows(x.rows(), n, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                rstd.as<float>()[at_rstd[r]] =
                    normalise_row(x.as<float>() + at_x[r], weights, y.as<float>() + at_y[r], n, eps);
            }
        });
    });
}

void add_rmsnorm(const Call& call) {
    const Tensor &x = call.in[0], &residual = call.in[1], &w = call.in[2];
    const Tensor &h = call.out[0], &y = call.out[1], &rstd = call.out[2];
    const int64_t n = x.dim(-1);
    const float eps = static_cast<float>(call.attrs.real("eps"));
    const RowOffsets at_x(x), at_residual(residual), at_h(h), at_y(y), at_rstd(rstd, 0);
    with_weights(w, [&](const auto* weights) {
        for_rows(x.rows(), n, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                const float* a = x.as<float>() + at_x[r];
                const float* b = residual.as<float>() + at_residual[r];
                float* sum = h.as<float>() + at_h[r];
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
                rstd.as<float>()[at_rstd[r]] = normalise_row(sum, weights, y.as<float>() + at_y[r], n, eps);
            }
        });
    });
}

// Row tiles of the weight gradient (_TILES in surogate/ops/rmsnorm.py); the workspace holds a partial sum for each.
constexpr int64_t kTiles = 16;

// dx may be dy or x; acc, where given, is dx as it was.
template <typename W>
SUROGATE_SIMD void input_gradient_row(const float* dy, const float* x, const W* w, float rstd, const float* acc,
                                      float* dx, int64_t n) {
    const float dot = lane_sum<float>(n, [&](int64_t i) { return dy[i] * widen(w[i]) * x[i]; });
    const float along_x = rstd * rstd * rstd * dot / static_cast<float>(n);
    if (acc) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) dx[i] = acc[i] + (rstd * dy[i] * widen(w[i]) - along_x * x[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) dx[i] = rstd * dy[i] * widen(w[i]) - along_x * x[i];
    }
}

SUROGATE_SIMD void weight_gradient_row(const float* dy, const float* x, float rstd, float* sums, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sums[i] += dy[i] * (x[i] * rstd);
}

void rmsnorm_backward(const Call& call) {
    const Tensor &dy = call.in[0], &x = call.in[1], &w = call.in[2], &rstd = call.in[3];
    const Tensor &acc_dx = call.in[4], &acc_dw = call.in[5], &dx = call.out[0], &dw = call.out[1];
    const int64_t rows = x.rows(), n = x.dim(-1);
    const RowOffsets at_dy(dy), at_x(x), at_rstd(rstd, 0), at_acc(acc_dx), at_dx(dx);
    float* partial = dw ? call.workspace.as<float>() : nullptr;

    with_weights(w, [&](const auto* weights) {
        auto do_rows = [&](int64_t begin, int64_t end, float* sums) {
            for (int64_t r = begin; r < end; ++r) {
                const float* dy_row = dy.as<float>() + at_dy[r];
                const float* x_row = x.as<float>() + at_x[r];
                const float scale = rstd.as<float>()[at_rstd[r]];
                if (sums) weight_gradient_row(dy_row, x_row, scale, sums, n);
                if (dx) {
                    const float* acc = acc_dx ? acc_dx.as<float>() + at_acc[r] : nullptr;
                    input_gradient_row(dy_row, x_row, weights, scale, acc, dx.as<float>() + at_dx[r], n);
                }
            }
        };
        if (!partial) return for_rows(rows, n, call.threads, [&](int64_t b, int64_t e) { do_rows(b, e, nullptr); });
        for_tiles(kTiles, call.threads, [&](int64_t tile) {
            float* sums = partial + tile * n;
            std::memset(sums, 0, static_cast<size_t>(n) * sizeof(float));
            do_rows(rows * tile / kTiles, rows * (tile + 1) / kTiles, sums);
        });
    });
    if (!partial) return;
    float* total = dw.as<float>();
    const float* start = acc_dw ? acc_dw.as<float>() : partial;
    for (int64_t i = 0; i < n; ++i) {
        float sum = 0.f;
        for (int64_t tile = acc_dw ? 0 : 1; tile < kTiles; ++tile) sum += partial[tile * n + i];
        total[i] = start[i] + sum;
    }
}

SUROGATE_CPU_KERNEL("rmsnorm", rmsnorm);
SUROGATE_CPU_KERNEL("add_rmsnorm", add_rmsnorm);
SUROGATE_CPU_KERNEL("rmsnorm_backward", rmsnorm_backward);

}  // namespace
}  // namespace surogate
