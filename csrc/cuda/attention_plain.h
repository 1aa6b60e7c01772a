// Attention without tensor cores: one warp a row, any head size up to 256, any strides, f32 or bf16.
#pragma once

#include <cuda_runtime_api.h>

#include "core/tensor.h"

namespace surogate::cuda {

struct PlainAttention {
    Tensor q, k, v, o, dout, dq, dk, dv;  // [tokens, heads or kv_heads, dim] of one dtype
    float* lse;                           // of head h and token t at h * lse_head + t * lse_token
    const int32_t* cu_seqlens;            // [documents + 1]
    int64_t lse_head = 0, lse_token = 0;
    int documents = 0;
    int64_t window = 0;  // 0: none
    float scale = 1.0F;
};

void plain_attention(const PlainAttention& a, cudaStream_t stream);
void plain_attention_backward(const PlainAttention& a, cudaStream_t stream);

}  // namespace surogate::cuda
