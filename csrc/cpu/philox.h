// Philox4x32-10: random numbers as a function of key and counter (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC11). surogate/ops/philox.py is its twin.
#pragma once

#include <cstdint>

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
    static constexpr int64_t kBlocks = kMax / 4 + 1;  // one more where `first` is inside a block
    static constexpr int kLanes = 8;

    // Lane by lane, so that a vector register holds the same word of several blocks.
    void generate(uint64_t block, int64_t blocks) {
        for (int64_t b = 0; b < blocks; b += kLanes) {
            uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                const uint64_t counter = block + static_cast<uint64_t>(b + i);
                c0[i] = static_cast<uint32_t>(counter);
                c1[i] = static_cast<uint32_t>(counter >> 32);
                c2[i] = salt_[0];
                c3[i] = salt_[1];
            }
            uint32_t k0 = key_[0], k1 = key_[1];
            for (int round = 0; round < 10; ++round) {
                for (int i = 0; i < kLanes; ++i) {
                    const uint64_t p0 = uint64_t{0xD2511F53u} * c0[i];
                    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2[i];
                    c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
                    c1[i] = static_cast<uint32_t>(p1);
                    c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
                    c3[i] = static_cast<uint32_t>(p0);
                }
                k0 += 0x9E3779B9u;
                k1 += 0xBB67AE85u;
            }
            uint32_t* out = buffer_ + 4 * b;
            for (int i = 0; i < kLanes; ++i) {
                out[4 * i] = c0[i];
                out[4 * i + 1] = c1[i];
                out[4 * i + 2] = c2[i];
                out[4 * i + 3] = c3[i];
            }
        }
    }

    uint32_t key_[2];
    uint32_t salt_[2];
    uint32_t buffer_[4 * (kBlocks + kLanes)];
};

}  // namespace surogate
