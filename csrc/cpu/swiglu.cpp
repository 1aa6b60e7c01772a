// swiglu and swiglu_backward (surogate/ops/swiglu.py). Results may take the storage of an operand.
#include "cpu/elementwise.h"
#include "cpu/lane_math.h"

namespace surogate {
namespace {

void swiglu(const Call& call) {
    map_binary(call, [](float g, float u) { return g * lane_sigmoid(g) * u; });
}

SUROGATE_SIMD void backward_run(const float* dy, const float* g, const float* u, float* dg, float* du, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float d = dy[i], gate = g[i], up = u[i];
        const float s = lane_sigmoid(gate);
        dg[i] = d * up * s * (1.f + gate * (1.f - s));
        du[i] = d * gate * s;
    }
}

void swiglu_backward(const Call& call) {
    const Tensor &dy = call.in[0], &g = call.in[1], &u = call.in[2], &dg = call.out[0], &du = call.out[1];
    Walk<5>({dy, g, u, dg, du}).for_each(call.threads, [&](const auto& offset, int64_t, int64_t count) {
        backward_run(dy.as<float>() + offset[0], g.as<float>() + offset[1], u.as<float>() + offset[2],
                     dg.as<float>() + offset[3], du.as<float>() + offset[4], count);
    });
}

SUROGATE_CPU_KERNEL("swiglu", swiglu);
SUROGATE_CPU_KERNEL("swiglu_backward", swiglu_backward);

}  // namespace
}  // namespace surogate
