// Weights in f32 or bf16, and how an update is rounded to bf16.
#pragma once

#include "cuda/common.cuh"
#include "cuda/philox.cuh"

namespace surogate::cuda {

// How the weights are kept: in f32; in bf16 beside an f32 master; in bf16 alone, rounded stochastically.
enum class Kept { wide, master, stochastic };

// To one of the two neighbours, so that the mean over uniform words is x (csrc/cpu/bf16.h has it bit for bit).
__device__ inline bf16 round_stochastically(float x, uint32_t word) {
    const uint32_t bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    const uint32_t high = is_nan ? (bits >> 16) | 0x40U : (bits + (word >> 16)) >> 16;
    return __ushort_as_bfloat16(static_cast<unsigned short>(high));
}

}  // namespace surogate::cuda
