// embedding and embedding_backward (surogate/ops/embedding.py).
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"

namespace surogate {
namespace {

// Before any thread starts: an exception must not leave a parallel region.
void check_ids(const int32_t* ids, int64_t tokens, int64_t rows) {
    for (int64_t t = 0; t < tokens; ++t) {
        if (ids[t] < 0 || ids[t] >= rows) {
            throw std::out_of_range("token id " + std::to_string(ids[t]) + " at position " + std::to_string(t) +
                                    " is outside the embedding table of " + std::to_string(rows) + " rows");
        }
    }
}

void embedding(const Call& call) {
    const Tensor &table = call.in[0], &y = call.out[0];
    const int32_t* ids = call.in[1].as<int32_t>();
    const int64_t tokens = y.shape[0], width = y.shape[1];
    check_ids(ids, tokens, table.shape[0]);
    with_weights(table, [&](const auto* rows) {
        for_rows(tokens, width, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const auto* from = rows + ids[t] * table.stride[0];
                float* to = y.as<float>() + t * y.stride[0];
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) to[i] = widen(from[i]);
            }
        });
    });
}

// Columns of a tile: each tile adds up all tokens, in their order, for its columns, so no two threads meet.
constexpr int64_t kColumns = 64;

void embedding_backward(const Call& call) {
    const Tensor &dy = call.in[0], &acc = call.in[2], &out = call.out[0];
    const int32_t* ids = call.in[1].as<int32_t>();
    const int64_t tokens = dy.shape[0], width = dy.shape[1];
    check_ids(ids, tokens, out.shape[0]);
    if (!acc) {
        for_rows(out.shape[0], width, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                std::memset(out.as<float>() + r * out.stride[0], 0, static_cast<size_t>(width) * sizeof(float));
            }
        });
    }
    for_ranges(width, kColumns, call.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = 0; t < tokens; ++t) {
            const float* __restrict from = dy.as<float>() + t * dy.stride[0];
            float* __restrict to = out.as<float>() + ids[t] * out.stride[0];
            for (int64_t i = begin; i < end; ++i) to[i] += from[i];
        }
    });
}

SUROGATE_CPU_KERNEL("embedding", embedding);
SUROGATE_CPU_KERNEL("embedding_backward", embedding_backward);

}  // namespace
}  // namespace surogate
