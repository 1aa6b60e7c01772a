#include "cpu/quantize_weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/blockwise8.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

constexpr int64_t kPiece = 512;  // weights that are looked at together

SUROGATE_INLINE float largest(const float* x, int64_t n) {
    float most = 0.f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    return most;
}

// How many of the middles between two numbers lie below each value: the index of its nearest number.
SUROGATE_SIMD void nearest(const float* x, float inverse, const float* middles, int32_t* index, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float scaled = x[i] * inverse;
        int32_t found = 0;
        for (int k = 0; k < 15; ++k) found += scaled > middles[k] ? 1 : 0;
        index[i] = found;
    }
}

template <typename T>
void quantize(const T* values, int64_t n, const float* middles, int64_t block, uint8_t* codes, float* absmax,
              int threads) {
    const int64_t blocks = (n + block - 1) / block;
    // Pairs of blocks: no byte belongs to two of them, whatever the block.
    for_ranges(blocks, 2 * std::max<int64_t>(1, kTileElements / block), threads, [&](int64_t begin, int64_t end) {
        float x[kPiece];
        int32_t index[kPiece];
        for (int64_t b = begin; b < end; ++b) {
            const int64_t first = b * block, last = std::min(n, first + block);
            float most = 0.f;
            for (int64_t i = first; i < last; ++i) {
                const float magnitude = std::fabs(widen(values[i]));
                most = magnitude > most || magnitude != magnitude ? magnitude : most;
            }
            absmax[b] = most;
            const float inverse = blockwise8::inverse(most);
            for (int64_t piece = first; piece < last; piece += kPiece) {
                const int64_t count = std::min(kPiece, last - piece);
                for (int64_t i = 0; i < count; ++i) x[i] = widen(values[piece + i]);
                nearest(x, inverse, middles, index, count);
                for (int64_t i = 0; i < count; ++i) {
                    uint8_t& byte = codes[(piece + i) / 2];
                    const auto code = static_cast<uint8_t>(index[i]);
                    byte = static_cast<uint8_t>((piece + i) % 2 == 0 ? code << 4 : byte | code);
                }
            }
        }
    });
}

}  // namespace

void quantize_4bit(const void* values, DType dtype, int64_t n, const float* numbers, int64_t block, uint8_t* codes,
                   float* absmax, int threads) {
    float middles[15];
    for (int k = 0; k < 15; ++k) middles[k] = (numbers[k] + numbers[k + 1]) / 2.f;
    if (dtype == DType::f32) {
        quantize(static_cast<const float*>(values), n, middles, block, codes, absmax, threads);
    } else {
        quantize(static_cast<const bf16*>(values), n, middles, block, codes, absmax, threads);
    }
}

void quantize_8bit(const float* values, int64_t n, const float* table, uint8_t* index, float* absmax, int threads) {
    uint8_t start[blockwise8::kStarts];
    for (int i = 0; i < blockwise8::kStarts; ++i) start[i] = blockwise8::start_of(i, table);
    constexpr int64_t kBlock = blockwise8::kBlock;
    for_ranges((n + kBlock - 1) / kBlock, kTileElements / kBlock, threads, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            const int64_t first = b * kBlock, count = std::min(kBlock, n - first);
            absmax[b] = largest(values + first, count);
            const float inverse = blockwise8::inverse(absmax[b]);
            for (int64_t i = 0; i < count; ++i) {
                index[first + i] = blockwise8::nearest(values[first + i] * inverse, table, start);
            }
        }
    });
}

}  // namespace surogate
