// add, mul and scale (surogate/ops/elementwise.py). Results may take the storage of an operand.
#include "core/kernel.h"
#include "cpu/parallel.h"

namespace surogate {
namespace {

template <typename Fn>
void binary(const Call& call, const Fn& fn) {
    const Tensor &a = call.in[0], &b = call.in[1], &y = call.out[0];
    Walk<3>({a, b, y}).for_each(call.threads, [&](const auto& offset, int64_t, int64_t count) {
        const float* left = a.as<float>() + offset[0];
        const float* right = b.as<float>() + offset[1];
        float* to = y.as<float>() + offset[2];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) to[i] = fn(left[i], right[i]);
    });
}

void add(const Call& call) {
    binary(call, [](float a, float b) { return a + b; });
}

void mul(const Call& call) {
    binary(call, [](float a, float b) { return a * b; });
}

void scale(const Call& call) {
    const Tensor &x = call.in[0], &y = call.out[0];
    const float alpha = static_cast<float>(call.attrs.real("alpha"));
    Walk<2>({x, y}).for_each(call.threads, [&](const auto& offset, int64_t, int64_t count) {
        const float* from = x.as<float>() + offset[0];
        float* to = y.as<float>() + offset[1];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) to[i] = alpha * from[i];
    });
}

SUROGATE_CPU_KERNEL("add", add);
SUROGATE_CPU_KERNEL("mul", mul);
SUROGATE_CPU_KERNEL("scale", scale);

}  // namespace
}  // namespace surogate
