// Weights to block-wise storage of four bits, and magnitudes to eight (surogate/ops/nf4.py): what a load does.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace surogate {

// The nearest of 16 ascending numbers times the largest magnitude of each block of `block` weights; the lower one of
// two that are equally near. `values`: f32 or bf16. codes[(n+1)/2]: the first of two weights in the high half.
void quantize_4bit(const void* values, DType dtype, int64_t n, const float* numbers, int64_t block, uint8_t* codes,
                   float* absmax, int threads);

// Blocks of 256, with a table as surogate/ops/blockwise8.py makes it.
void quantize_8bit(const float* values, int64_t n, const float* table, uint8_t* index, float* absmax, int threads);

}  // namespace surogate
