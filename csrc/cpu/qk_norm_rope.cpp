// qk_norm_rope and its backward pass (surogate/ops/qk_norm_rope.py).
#include <cmath>
#include <cstring>

#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/reduce.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

constexpr int64_t kMostDim = 256;  // MOST_DIM in surogate/ops/qk_norm_rope.py
constexpr int64_t kTiles = 16;     // of tokens: partial weight gradients (_TILES there)

SUROGATE_INLINE float rstd_of(const float* x, int64_t n, float eps) {
    const float sum = lane_sum<float>(n, [&](int64_t i) { return x[i] * x[i]; });
    return 1.f / std::sqrt(sum / static_cast<float>(n) + eps);
}

// The heads of a token. y may be x: both halves of a pair are read before either is written.
template <typename W>
SUROGATE_SIMD void heads_forward(const float* x, int64_t x_step, const W* w, const float* cos, const float* sin,
                                 float* y, int64_t y_step, int64_t heads, int64_t half, float eps) {
    for (int64_t h = 0; h < heads; ++h, x += x_step, y += y_step) {
        const float rstd = rstd_of(x, 2 * half, eps);
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
            const float n1 = x[i] * rstd * widen(w[i]), n2 = x[half + i] * rstd * widen(w[half + i]);
            y[i] = n1 * cos[i] - n2 * sin[i];
            y[half + i] = n2 * cos[i] + n1 * sin[i];
        }
    }
}

// dx (null: not wanted) may be dy; sums (null: not wanted) collects the weight's gradient.
template <typename W>
SUROGATE_SIMD void heads_backward(const float* dy, int64_t dy_step, const float* x, int64_t x_step, const W* w,
                                  const float* cos, const float* sin, float* dx, int64_t dx_step, float* sums,
                                  int64_t heads, int64_t half, float eps) {
    float back[kMostDim];  // dy rotated back
    const int64_t n = 2 * half;
    for (int64_t h = 0; h < heads; ++h, dy += dy_step, x += x_step) {
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
            back[i] = dy[i] * cos[i] + dy[half + i] * sin[i];
            back[half + i] = dy[half + i] * cos[i] - dy[i] * sin[i];
        }
        const float rstd = rstd_of(x, n, eps);
        if (sums) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) sums[i] += back[i] * (x[i] * rstd);
        }
        if (dx) {
            const float dot = lane_sum<float>(n, [&](int64_t i) { return back[i] * widen(w[i]) * x[i]; });
            const float along_x = rstd * rstd * rstd * dot / static_cast<float>(n);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) dx[i] = rstd * back[i] * widen(w[i]) - along_x * x[i];
            dx += dx_step;
        }
    }
}

const float* row(const Tensor& t, int64_t token) { return t.as<float>() + token * t.stride[0]; }
float* out_row(const Tensor& t, int64_t token) { return t ? t.as<float>() + token * t.stride[0] : nullptr; }

void qk_norm_rope(const Call& call) {
    const Tensor &cos = call.in[4], &sin = call.in[5];
    const float eps = static_cast<float>(call.attrs.real("eps"));
    for (size_t part : {0, 1}) {
        const Tensor &x = call.in[part], &y = call.out[part];
        const int64_t heads = x.shape[1], half = x.shape[2] / 2;
        with_weights(call.in[2 + part], [&](const auto* w) {
            for_rows(x.shape[0], heads * 2 * half, call.threads, [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                    heads_forward(row(x, t), x.stride[1], w, row(cos, t), row(sin, t), out_row(y, t), y.stride[1],
                                  heads, half, eps);
                }
            });
        });
    }
}

void qk_norm_rope_backward(const Call& call) {
    const Tensor &cos = call.in[6], &sin = call.in[7];
    const float eps = static_cast<float>(call.attrs.real("eps"));
    for (size_t part : {0, 1}) {
        const Tensor &dy = call.in[part], &x = call.in[2 + part], &acc = call.in[8 + part];
        const Tensor &dx = call.out[part], &dw = call.out[2 + part];
        const int64_t tokens = x.shape[0], heads = x.shape[1], half = x.shape[2] / 2, n = 2 * half;
        float* partial = dw ? call.workspace.as<float>() : nullptr;
        with_weights(call.in[4 + part], [&](const auto* w) {
            auto do_tokens = [&](int64_t begin, int64_t end, float* sums) {
                for (int64_t t = begin; t < end; ++t) {
                    heads_backward(row(dy, t), dy.stride[1], row(x, t), x.stride[1], w, row(cos, t), row(sin, t),
                                   out_row(dx, t), dx ? dx.stride[1] : 0, sums, heads, half, eps);
                }
            };
            if (!partial) {
                return for_rows(tokens, heads * n, call.threads,
                                [&](int64_t begin, int64_t end) { do_tokens(begin, end, nullptr); });
            }
            for_tiles(kTiles, call.threads, [&](int64_t tile) {
                float* sums = partial + tile * n;
                std::memset(sums, 0, static_cast<size_t>(n) * sizeof(float));
                do_tokens(tokens * tile / kTiles, tokens * (tile + 1) / kTiles, sums);
            });
        });
        if (!partial) continue;
        for (int64_t i = 0; i < n; ++i) {
            float sum = 0.f;
            for (int64_t tile = 0; tile < kTiles; ++tile) sum += partial[tile * n + i];
            dw.as<float>()[i] = acc ? acc.as<float>()[i] + sum : sum;
        }
    }
}

SUROGATE_CPU_KERNEL("qk_norm_rope", qk_norm_rope);
SUROGATE_CPU_KERNEL("qk_norm_rope_backward", qk_norm_rope_backward);

}  // namespace
}  // namespace surogate
