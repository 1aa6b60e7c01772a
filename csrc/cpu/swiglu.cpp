// swiglu and swiglu_backward (surogate/ops/swiglu.py). Results may take the storage of an operand.
#include "core/kernel.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

void swiglu(const Call& call) {
    const Tensor &g = call.in[0], &u = call.in[1], &y = call.out[0];
    Walk<3>({g, u, y}).for_each(call.threads, [&](const auto& offset, int64_t, int64_t count) {
        const float* gate = g.as<float>() + offset[0];
        const float* up = u.as<float>() + offset[1];
        float* to = y.as<float>() + offset[2];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) to[i] = gate[i] * vec_sigmoid(gate[i]) * up[i];
    });
}

void swiglu_backward(const Call& call) {
    const Tensor &dy = call.in[0], &g = call.in[1], &u = call.in[2], &dg = call.out[0], &du = call.out[1];
    Walk<5>({dy, g, u, dg, du}).for_each(call.threads, [&](const auto& offset, int64_t, int64_t count) {
        const float* cotangent = dy.as<float>() + offset[0];
        const float* gate = g.as<float>() + offset[1];
        const float* up = u.as<float>() + offset[2];
        float* to_gate = dg.as<float>() + offset[3];
        float* to_up = du.as<float>() + offset[4];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            const float d = cotangent[i], x = gate[i], other = up[i];
            const float s = vec_sigmoid(x);
            to_gate[i] = d * other * s * (1.f + x * (1.f - s));
            to_up[i] = d * x * s;
        }
    });
}

SUROGATE_CPU_KERNEL("swiglu", swiglu);
SUROGATE_CPU_KERNEL("swiglu_backward", swiglu_backward);

}  // namespace
}  // namespace surogate
