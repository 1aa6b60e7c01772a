// Philox4x32-10 (Salmon et al., SC11): element i gets word i%4 of the block with counter (i/4, salt) and key = seed, as
// csrc/cpu/philox.h has it, so masks and roundings are those of the CPU.
#pragma once

#include <cstdint>

namespace surogate::cuda {

__device__ inline uint4 philox(uint64_t counter, uint64_t salt, uint64_t seed) {
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c2 = static_cast<uint32_t>(salt), c3 = static_cast<uint32_t>(salt >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53U, c0), low0 = 0xD2511F53U * c0;
        const uint32_t high1 = __umulhi(0xCD9E8D57U, c2), low1 = 0xCD9E8D57U * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9U;
        k1 += 0xBB67AE85U;
    }
    return make_uint4(c0, c1, c2, c3);
}

// Word `index` of a block.
__device__ inline uint32_t word(const uint4& block, int index) {
    return index == 0 ? block.x : index == 1 ? block.y : index == 2 ? block.z : block.w;
}

}  // namespace surogate::cuda
