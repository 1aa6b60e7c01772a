// Eight-bit block-wise storage of floats (surogate/ops/blockwise8.py): the nearest of 256 ascending numbers, found in
// a few steps from where the leading bits of the value say that the search should begin. For host and device.
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

// Values fall into classes by sign, exponent (those below 2^-24 together) and four bits of mantissa.
constexpr int kShift = 19, kLowest = (127 - 24) << 4, kClasses = (24 << 4) + 1;
constexpr int kStarts = 2 * kClasses;

SUROGATE_BOTH uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

SUROGATE_BOTH int class_of(float x) {  // of a value between -1 and 1
    const uint32_t bits = bits_of(x);
    int found = static_cast<int>((bits & 0x7FFFFFFFu) >> kShift) - kLowest;
    found = found < 0 ? 0 : found >= kClasses ? kClasses - 1 : found;
    return (bits >> 31) != 0 ? kClasses + found : found;
}

// Index of the first number that is not below the least value of a class.
SUROGATE_BOTH uint8_t start_of(int of_class, const float* code) {
    const bool negative = of_class >= kClasses;
    const int index = negative ? of_class - kClasses + 1 : of_class;  // the least negative value ends the class
    float least = 0.f;
    if (index > 0) {
        const uint32_t bits = (static_cast<uint32_t>(index + kLowest) << kShift) | (negative ? 0x80000000u : 0u);
        memcpy(&least, &bits, sizeof least);
    }
    int low = 0, high = 255;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (code[middle] < least) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return static_cast<uint8_t>(low);
}

// 1 / absmax; blocks smaller than 1e-38 all over are stored as zeros.
SUROGATE_BOTH float inverse(float absmax) { return 1.f / (absmax > 1e-38f ? absmax : 1e-38f); }

// Index of the number nearest to `x`, the lower one of two that are equally near. `code` ends with 1.
SUROGATE_BOTH uint8_t nearest(float x, const float* code, const uint8_t* start) {
    x = x > 1.f ? 1.f : x;
    x = x >= -1.f ? x : -1.f;  // a NaN too
    int right = start[class_of(x)];
    while (code[right] < x) ++right;
    if (right == 0) return 0;
    return static_cast<uint8_t>(code[right] - x < x - code[right - 1] ? right : right - 1);
}

}  // namespace surogate::blockwise8
