// Eight-bit block-wise storage of floats (surogate/ops/blockwise8.py): the nearest of 256 ascending numbers, found
// without a branch. For host and device.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SUROGATE_BOTH __host__ __device__ inline
#else
#define SUROGATE_BOTH inline
#endif

namespace surogate::blockwise8 {

constexpr int kBlock = 256;
// A table: 256 numbers; for each but the first the least value that is stored as it or a higher one; infinity.
constexpr int kTable = 512, kThresholds = 256;

// Values fall into classes by sign, exponent (those below 2^-24 together) and seven bits of mantissa: few enough for
// the fastest memory, and so narrow that at most one threshold lies within each (a test holds that).
constexpr int kShift = 16, kLowest = (127 - 24) << 7, kClasses = (24 << 7) + 1;
constexpr int kStarts = 2 * kClasses;

SUROGATE_BOTH float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The class of a value between -1 and 1.
SUROGATE_BOTH int class_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int found = static_cast<int>((bits & 0x7FFFFFFFu) >> kShift) - kLowest;
    found = found < 0 ? 0 : found;
    return (bits >> 31) != 0 ? kClasses + found : found;
}

// As which number the least value of a class is stored.
SUROGATE_BOTH uint8_t start_of(int of_class, const float* table) {
    const bool negative = of_class >= kClasses;
    const auto index = static_cast<uint32_t>(negative ? of_class - kClasses : of_class);
    float least = index > 0 ? float_of((index + kLowest) << kShift) : 0.f;
    if (negative) least = -float_of(((index + 1 + kLowest) << kShift) - 1);
    int low = 0, high = 255;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (table[kThresholds + middle] <= least) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return static_cast<uint8_t>(low);
}

// 1 / absmax; blocks smaller than 1e-38 all over are stored as zeros.
SUROGATE_BOTH float inverse(float absmax) { return 1.f / (absmax > 1e-38f ? absmax : 1e-38f); }

// As which number a value is stored: the nearest, the lower one of two that are equally near.
SUROGATE_BOTH uint8_t nearest(float x, const float* table, const uint8_t* start) {
    x = x < 1.f ? x : 1.f;  // a NaN too
    x = x > -1.f ? x : -1.f;
    const int found = start[class_of(x)];
    return static_cast<uint8_t>(found + (x >= table[kThresholds + found] ? 1 : 0));
}

}  // namespace surogate::blockwise8
