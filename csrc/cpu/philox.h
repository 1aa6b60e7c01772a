// Philox4x32-10: random numbers as a function of key and counter (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC11). surogate/ops/philox.py is its twin.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "cpu/vec_math.h"

namespace surogate {

// The 32-bit words of the elements of a tensor. Element i gets word i%4 of the block whose counter is (i/4, salt) and
// whose key is `seed`, each a 64-bit number, low word first.
class Philox {
   public:
    static constexpr int64_t kMax = 256;  // elements a call of words()

    Philox(int64_t seed, int64_t salt)
        : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)},
          salt_{static_cast<uint32_t>(salt), static_cast<uint32_t>(static_cast<uint64_t>(salt) >> 32)} {}

    // The words of elements first .. first+count-1, count <= kMax; valid until the next call.
    const uint32_t* words(int64_t first, int64_t count) {
        const int64_t lead = first % 4;
        generate(static_cast<uint64_t>(first / 4), (lead + count + 3) / 4);
        return buffer_ + lead;
    }

   private:
    // Four blocks side by side. Only the low half of a lane is a word; what is left in the high half is ignored.
    static constexpr int64_t kLanes = 4;
    using Lanes = uint64_t __attribute__((vector_size(8 * kLanes)));
    // Room for one more block where `first` is inside one, in whole groups of lanes.
    static constexpr int64_t kGroups = (kMax / 4 + 1 + kLanes - 1) / kLanes;

    // Low halves times `factor`, exact in 64 bits. Compilers do not find the one instruction for this.
    SUROGATE_INLINE static Lanes multiply(Lanes words, uint32_t factor) {
#ifdef __AVX2__
        return reinterpret_cast<Lanes>(
            _mm256_mul_epu32(reinterpret_cast<__m256i>(words), _mm256_set1_epi64x(static_cast<int64_t>(factor))));
#else
        return (words & 0xFFFFFFFFu) * uint64_t{factor};
#endif
    }

    SUROGATE_SIMD void generate(uint64_t block, int64_t blocks) {
        for (int64_t b = 0; b < blocks; b += kLanes) {
            const Lanes counter = block + static_cast<uint64_t>(b) + Lanes{0, 1, 2, 3};
            Lanes c0 = counter, c1 = counter >> 32, c2 = Lanes{} + salt_[0], c3 = Lanes{} + salt_[1];
            uint32_t k0 = key_[0], k1 = key_[1];
            for (int round = 0; round < 10; ++round) {
                const Lanes p0 = multiply(c0, 0xD2511F53u), p1 = multiply(c2, 0xCD9E8D57u);
                c0 = (p1 >> 32) ^ c1 ^ uint64_t{k0};
                c1 = p1;
                c2 = (p0 >> 32) ^ c3 ^ uint64_t{k1};
                c3 = p0;
                k0 += 0x9E3779B9u;
                k1 += 0xBB67AE85u;
            }
            const Lanes first = (c0 & 0xFFFFFFFFu) | (c1 << 32), second = (c2 & 0xFFFFFFFFu) | (c3 << 32);
            const Lanes out[2] = {{first[0], second[0], first[1], second[1]},
                                  {first[2], second[2], first[3], second[3]}};
            std::memcpy(buffer_ + 4 * b, out, sizeof out);
        }
    }

    uint32_t key_[2];
    uint32_t salt_[2];
    alignas(32) uint32_t buffer_[4 * kLanes * kGroups];
};

static_assert(std::endian::native == std::endian::little, "pairs of words are stored as 64-bit numbers");

}  // namespace surogate
