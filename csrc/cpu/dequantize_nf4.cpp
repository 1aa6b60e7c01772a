// dequantize_nf4 (surogate/ops/dequantize_nf4.py): four-bit weights as f32 or bf16, row by row.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

// Magnitudes that share one, where they are quantised themselves.
constexpr int64_t kGroup = 256;

struct Source {
    const uint8_t* codes;
    const float* absmax;  // null: `index` and what follows
    const uint8_t* index;
    const float *groups, *table;
    float offset;
    const float* pairs;  // the two numbers of every byte
    int64_t block;

    // The product is rounded before the sum, as in bitsandbytes: this file is compiled without contraction.
    float magnitude(int64_t of_block) const {
        if (absmax != nullptr) return absmax[of_block];
        return table[index[of_block]] * groups[of_block / kGroup] + offset;
    }
};

void store(float* y, float x) { *y = x; }
void store(bf16* y, float x) { *y = narrow(x); }

SUROGATE_INLINE void whole_bytes_of(const uint8_t* codes, const float* pairs, float scale, float* y, int64_t bytes) {
    for (int64_t i = 0; i < bytes; ++i) {
        y[2 * i] = pairs[2 * codes[i]] * scale;
        y[2 * i + 1] = pairs[2 * codes[i] + 1] * scale;
    }
}
SUROGATE_SIMD void whole_bytes(const uint8_t* codes, const float* pairs, float scale, float* y, int64_t bytes) {
    whole_bytes_of(codes, pairs, scale, y, bytes);
}
SUROGATE_SIMD void whole_bytes(const uint8_t* codes, const float* pairs, float scale, bf16* y, int64_t bytes) {
    constexpr int64_t kPiece = 64;
    float wide[2 * kPiece];
    for (int64_t first = 0; first < bytes; first += kPiece) {
        const int64_t n = std::min(kPiece, bytes - first);
        whole_bytes_of(codes + first, pairs, scale, wide, n);
        for (int64_t i = 0; i < 2 * n; ++i) y[2 * first + i] = narrow(wide[i]);
    }
}

// Weights `begin` to `end` of all, to y.
template <typename T>
void row(const Source& s, int64_t begin, int64_t end, T* y) {
    while (begin < end) {
        const int64_t of_block = begin / s.block, stop = std::min(end, (of_block + 1) * s.block);
        const float scale = s.magnitude(of_block);
        if (begin % 2 != 0) {
            store(y++, s.pairs[2 * s.codes[begin / 2] + 1] * scale);
            ++begin;
        }
        const int64_t bytes = (stop - begin) / 2;
        whole_bytes(s.codes + begin / 2, s.pairs, scale, y, bytes);
        y += 2 * bytes;
        begin += 2 * bytes;
        if (begin < stop) {
            store(y++, s.pairs[2 * s.codes[begin / 2]] * scale);
            ++begin;
        }
    }
}

void dequantize_nf4(const Call& call) {
    const Tensor &codes = call.in[0], &absmax = call.in[1], &y = call.out[0];
    const auto* numbers = call.in[5].as<float>();
    float pairs[512];
    for (int byte = 0; byte < 256; ++byte) {
        pairs[2 * byte] = numbers[byte >> 4];
        pairs[2 * byte + 1] = numbers[byte & 15];
    }
    const bool nested = absmax.dtype == DType::u8;
    const Source source{
        .codes = codes.as<uint8_t>(),
        .absmax = nested ? nullptr : absmax.as<float>(),
        .index = absmax.as<uint8_t>(),
        .groups = call.in[2].as<float>(),
        .table = call.in[4].as<float>(),
        .offset = nested ? *call.in[3].as<float>() : 0.f,
        .pairs = pairs,
        .block = call.attrs.integer("block"),
    };
    const int64_t width = y.dim(1), first = call.attrs.integer("first"), rows = 2 * codes.numel() / width;
    with_weights(y, [&](auto* data) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
        for_rows(rows, width, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                row(source, r * width, (r + 1) * width, y.as<T>() + y.row_offset(first + r));
            }
        });
    });
}

SUROGATE_CPU_KERNEL("dequantize_nf4", dequantize_nf4);

}  // namespace
}  // namespace surogate
