// rope_table and rope (surogate/ops/rope.py).
#include <cmath>

#include "core/kernel.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

void rope_table(const Call& call) {
    const Tensor &positions = call.in[0], &inv_freq = call.in[1], &cos = call.out[0], &sin = call.out[1];
    const int64_t half = inv_freq.shape[0];
    const double scale = call.attrs.real("scale", 1.0);
    // 16 times fewer elements a tile than of a memory-bound op: a sine takes that much longer than a load.
    for_rows(positions.shape[0], 16 * half, call.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* c = cos.as<float>() + t * cos.stride[0];
            float* s = sin.as<float>() + t * sin.stride[0];
            const double position = positions.as<int32_t>()[t];
            for (int64_t i = 0; i < half; ++i) {
                const double angle = position * static_cast<double>(inv_freq.as<float>()[i]);
                c[i] = static_cast<float>(std::cos(angle) * scale);
                s[i] = static_cast<float>(std::sin(angle) * scale);
            }
        }
    });
}

// The heads of one token. y may be x: both halves of a pair are read before either is written.
SUROGATE_SIMD void rotate(const float* x, int64_t x_stride, const float* cos, const float* sin, float sign, float* y,
                          int64_t y_stride, int64_t heads, int64_t half) {
    for (int64_t h = 0; h < heads; ++h, x += x_stride, y += y_stride) {
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
            const float x1 = x[i], x2 = x[half + i], sine = sign * sin[i];
            y[i] = x1 * cos[i] - x2 * sine;
            y[half + i] = x2 * cos[i] + x1 * sine;
        }
    }
}

void rope(const Call& call) {
    const Tensor &x = call.in[0], &cos = call.in[1], &sin = call.in[2], &y = call.out[0];
    const int64_t tokens = x.shape[0], heads = x.shape[1], half = x.shape[2] / 2;
    const float sign = call.attrs.flag("inverse") ? -1.f : 1.f;
    for_rows(tokens, heads * 2 * half, call.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            rotate(x.as<float>() + t * x.stride[0], x.stride[1], cos.as<float>() + t * cos.stride[0],
                   sin.as<float>() + t * sin.stride[0], sign, y.as<float>() + t * y.stride[0], y.stride[1], heads,
                   half);
        }
    });
}

SUROGATE_CPU_KERNEL("rope_table", rope_table);
SUROGATE_CPU_KERNEL("rope", rope);

}  // namespace
}  // namespace surogate
