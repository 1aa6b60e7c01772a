// Sixteen floats at a time, and the exponential of them. Every order of sums is that of sixteen lanes whatever the
// processor has: one register of AVX-512 or two of AVX2.
#pragma once

#include <cstdint>
#include <limits>

#if defined(__GNUC__) && !defined(__clang__)
// Vectors are never passed by value between functions that are not inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

// Compiles a function for AVX-512 too; the loader picks. Only for plain loops: code that OpenMP moves out of a function
// would be left behind. Sanitizers do not get along with functions that the loader picks.
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SUROGATE_SIMD __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define SUROGATE_SIMD
#endif

#define SUROGATE_INLINE inline __attribute__((always_inline))

namespace surogate::simd {

constexpr int64_t kLanes = 16;

// Aligned as floats are, so that they may be read anywhere.
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

constexpr int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

SUROGATE_INLINE Floats& at(float* p) { return *reinterpret_cast<Floats*>(p); }
SUROGATE_INLINE const Floats& at(const float* p) { return *reinterpret_cast<const Floats*>(p); }

// y = e^x within 2 units in the last place; 0 below -87.3, infinity above 88.3, NaN for NaN.
//
// x = n ln2 + r with |r| <= ln2/2, so e^x = 2^n e^r: e^r by the polynomial of Cephes' expf, 2^n by its exponent bits.
SUROGATE_INLINE void exp(const Floats& x, Floats& y) {
    constexpr float kToInteger = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Floats shifted = x * 1.44269504088896341f + kToInteger;
    const Floats n = shifted - kToInteger;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    const Ints exponent = ((Ints)shifted - 0x4B400000 + 127) << 23;
    p *= (Floats)exponent;
    constexpr float inf = std::numeric_limits<float>::infinity();
    p = x < -87.3f ? Floats{} : p;
    y = x > 88.3f ? Floats{} + inf : p;
}

SUROGATE_INLINE float sum(const Floats& x) {
    float s[kLanes];
    for (int i = 0; i < kLanes; ++i) s[i] = x[i];
    for (int64_t width = kLanes / 2; width > 0; width /= 2)
        for (int64_t i = 0; i < width; ++i) s[i] += s[i + width];
    return s[0];
}

SUROGATE_INLINE float largest(const Floats& x) {
    float m = x[0];
    for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
    return m;
}

// The largest of x[0..n); n is a multiple of kLanes. NaNs are passed over.
SUROGATE_INLINE float largest(const float* x, int64_t n) {
    Floats m = Floats{} - std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; i += kLanes) m = at(x + i) > m ? at(x + i) : m;
    return largest(m);
}

// x = e^(x - shift) for x[0..n), n a multiple of kLanes; returns the sum of the results.
SUROGATE_INLINE float exp_and_sum(float* x, int64_t n, float shift) {
    Floats total{};
    for (int64_t i = 0; i < n; i += kLanes) {
        exp(at(x + i) - shift, at(x + i));
        total += at(x + i);
    }
    return sum(total);
}

SUROGATE_INLINE void fill(float* x, int64_t begin, int64_t end, float value) {
    for (int64_t i = begin; i < end; ++i) x[i] = value;
}

}  // namespace surogate::simd
