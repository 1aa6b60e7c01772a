// bf16 as the device rounds: to nearest, ties to even.
#pragma once

#include "cuda_runtime_api.h"

struct __nv_bfloat16 {
    uint16_t bits;

    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {  // NOLINT: as CUDA's
        const unsigned all = __float_as_uint(x);
        const bool nan = (all & 0x7FFFFFFFU) > 0x7F800000U;
        bits = static_cast<uint16_t>(nan ? 0x7FFFU : (all + 0x7FFFU + (all >> 16 & 1U)) >> 16);
    }
    operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }  // NOLINT: as CUDA's
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) {
    __nv_bfloat16 y;
    y.bits = x;
    return y;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline bool __hisnan(__nv_bfloat16 x) { return std::isnan(static_cast<float>(x)); }
