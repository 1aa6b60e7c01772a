// Functions of one float without branches or calls, so that compilers turn a loop over them into vector code.
// (vec_math.h has the exponential of whole vectors, for code that keeps its data in them.)
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "cpu/vec_math.h"

namespace surogate {

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.4, NaN for NaN.
//
// x = n ln2 + r with |r| <= ln2/2, so e^x = 2^n e^r: e^r by the polynomial of Cephes' expf, 2^n by its exponent bits.
SUROGATE_INLINE float lane_exp(float x) {
    constexpr float kToInteger = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const float capped = x > 88.7f ? 88.7f : x;
    const float shifted = capped * 1.44269504f + kToInteger;
    const float n = shifted - kToInteger;
    const float r = capped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    // 2^128 is infinity: the exponent field is full and the mantissa empty.
    const float power = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) - 0x4B400000u + 127u) << 23);
    return x < -87.3f ? 0.f : p * power;
}

SUROGATE_INLINE float lane_sigmoid(float x) { return 1.f / (1.f + lane_exp(-x)); }

// tanh within 2 units in the last place: from an exponential, and by an odd polynomial (fitted to |x| < 0.56 for the
// least relative error) where that would cancel.
SUROGATE_INLINE float lane_tanh(float x) {
    const float a = std::fabs(x);
    const float e = lane_exp(-2.f * a);
    const float s = a * a;
    float p = -6.2074429e-3f;
    p = p * s + 2.1027237e-2f;
    p = p * s - 5.3842280e-2f;
    p = p * s + 1.3332499e-1f;
    p = p * s - 3.3333315e-1f;
    return std::copysign(a < 0.55f ? a + a * s * p : (1.f - e) / (1.f + e), x);
}

}  // namespace surogate
