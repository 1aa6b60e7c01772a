// Activation functions and their derivatives (surogate/ops/activations.py).
#include <cmath>

#include "cpu/elementwise.h"
#include "cpu/lane_math.h"

namespace surogate {
namespace {

// out[0] = in[0] * derivative(in[1])
template <typename Fn>
void backward(const Call& call, const Fn& derivative) {
    map_binary(call, [derivative](float dy, float x) { return dy * derivative(x); });
}

void silu(const Call& call) {
    map_unary(call, [](float x) { return x * lane_sigmoid(x); });
}

void silu_backward(const Call& call) {
    backward(call, [](float x) {
        const float s = lane_sigmoid(x);
        return s * (1.f + x * (1.f - s));
    });
}

constexpr float kDensityAtZero = 0.39894228f;  // 1/sqrt(2 pi)

struct Normal {
    float distribution, density;
};

// The normal distribution function and its density from one exponential. For a >= 0,
// distribution(-a) = exp(-a^2/2) * R(a), where R falls smoothly from 1/2 like Mills' ratio: a polynomial in
// 1 / (1 + 0.3 a), fitted to a in [0, 13.5] for the least relative error (1.3e-7). So the left tail, where 1 + erf
// would cancel, keeps its digits.
SUROGATE_INLINE Normal normal(float x) {
    const float a = std::fabs(x) < 12.5f ? std::fabs(x) : 12.5f;  // beyond it results would be denormal
    const float e = lane_exp(-0.5f * a * a);
    const float t = 1.f / (1.f + 0.3f * a);
    float r = 0.035934030f;
    r = r * t - 0.15828578f;
    r = r * t + 0.20822395f;
    r = r * t - 0.055410143f;
    r = r * t + 0.12947798f;
    r = r * t + 0.099634792f;
    r = r * t + 0.12079880f;
    r = r * t + 0.11962636f;
    const float tail = e * r * t;
    return {x < 0.f ? tail : 1.f - tail, kDensityAtZero * e};
}

void gelu(const Call& call) {
    map_unary(call, [](float x) { return x * normal(x).distribution; });
}

void gelu_backward(const Call& call) {
    backward(call, [](float x) {
        const Normal n = normal(x);
        return n.distribution + x * n.density;
    });
}

// gelu_tanh(x) = x * (1 + tanh(u)) / 2 = x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 x^3).
constexpr float kGeluLinear = 1.5957691f;   // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.071354816f;  // 0.044715 times that

void gelu_tanh(const Call& call) {
    map_unary(call, [](float x) { return x * lane_sigmoid(x * (kGeluLinear + kGeluCubic * x * x)); });
}

void gelu_tanh_backward(const Call& call) {
    backward(call, [](float x) {
        const float s = lane_sigmoid(x * (kGeluLinear + kGeluCubic * x * x));
        return s + x * s * (1.f - s) * (kGeluLinear + 3.f * kGeluCubic * x * x);
    });
}

void relu(const Call& call) {
    // Written so that a NaN passes through.
    map_unary(call, [](float x) { return x < 0.f ? 0.f : x; });
}

void relu_backward(const Call& call) {
    backward(call, [](float x) { return x > 0.f ? 1.f : 0.f; });
}

void tanh(const Call& call) {
    map_unary(call, [](float x) { return lane_tanh(x); });
}

void tanh_backward(const Call& call) {
    // 1 - tanh^2 without the cancellation of large x.
    backward(call, [](float x) {
        const float e = lane_exp(-2.f * std::fabs(x));
        return 4.f * e / ((1.f + e) * (1.f + e));
    });
}

SUROGATE_CPU_KERNEL("silu", silu);
SUROGATE_CPU_KERNEL("silu_backward", silu_backward);
SUROGATE_CPU_KERNEL("gelu", gelu);
SUROGATE_CPU_KERNEL("gelu_backward", gelu_backward);
SUROGATE_CPU_KERNEL("gelu_tanh", gelu_tanh);
SUROGATE_CPU_KERNEL("gelu_tanh_backward", gelu_tanh_backward);
SUROGATE_CPU_KERNEL("relu", relu);
SUROGATE_CPU_KERNEL("relu_backward", relu_backward);
SUROGATE_CPU_KERNEL("tanh", tanh);
SUROGATE_CPU_KERNEL("tanh_backward", tanh_backward);

}  // namespace
}  // namespace surogate
