// Functions of one and of two elements over whole tensors. The result may take the storage of an operand.
#pragma once

#include "core/kernel.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"

namespace surogate {

template <typename Fn>
SUROGATE_SIMD void map_run(const float* x, float* y, int64_t n, Fn fn) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = fn(x[i]);
}

template <typename Fn>
SUROGATE_SIMD void map_run(const float* a, const float* b, float* y, int64_t n, Fn fn) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = fn(a[i], b[i]);
}

// out[0] = fn(in[0])
template <typename Fn>
void map_unary(const Call& call, const Fn& fn) {
    const Tensor &x = call.in[0], &y = call.out[0];
    Walk<2>({x, y}).for_each(call.threads, [&](const auto& offset, int64_t, int64_t count) {
        map_run(x.as<float>() + offset[0], y.as<float>() + offset[1], count, fn);
    });
}

// out[0] = fn(in[0], in[1])
template <typename Fn>
void map_binary(const Call& call, const Fn& fn) {
    const Tensor &a = call.in[0], &b = call.in[1], &y = call.out[0];
    Walk<3>({a, b, y}).for_each(call.threads, [&](const auto& offset, int64_t, int64_t count) {
        map_run(a.as<float>() + offset[0], b.as<float>() + offset[1], y.as<float>() + offset[2], count, fn);
    });
}

}  // namespace surogate
