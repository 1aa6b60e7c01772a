// Attention on packed tokens by cuDNN. The one file that sees cuDNN's frontend is cudnn.cpp: its headers take a minute
// to compile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

namespace surogate::cuda {

// How a tensor [tokens, heads, dim] lies in memory: elements from token to token, and from head to head.
struct Steps {
    int64_t token = 0, head = 0;
};

struct SdpaProblem {
    bool backward = false;
    int64_t documents = 0;  // at most so many; the others have length 0
    int64_t length = 0;     // of the longest document, at most
    int64_t tokens = 0, heads = 0, kv_heads = 0, dim = 0;
    int64_t window = 0;  // 0: none
    float scale = 1.0F;
    bool deterministic = false;  // the backward pass
    // Statistics as [documents, heads, length] instead of packed [tokens, heads].
    bool padded_statistics = false;
    Steps q, k, v, o, dout, dq, dk, dv;

    std::string key() const;
};

// bf16 but for the statistics (f32: logarithms of the sums of exponentials), the offsets (i64[documents+1]: where in
// its tensor a document begins, in elements) and the lengths (i32[documents]).
struct SdpaOperands {
    void *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr, *statistics = nullptr;
    void *dout = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
    void* lengths = nullptr;
    // By distance between tokens: offsets of two tensors with one distance are the same.
    void* (*offsets)(const void* context, int64_t token_stride) = nullptr;
    const void* context = nullptr;
    void* workspace = nullptr;
};

class Sdpa {
   public:
    virtual ~Sdpa() = default;
    virtual int64_t workspace() const = 0;  // bytes
    virtual void run(const SdpaOperands& operands, cudaStream_t stream) = 0;
};

// Makes the plan of a problem, or finds it; not in a capture. Throws std::runtime_error with cuDNN's reason where it
// has no kernel.
std::shared_ptr<Sdpa> plan_sdpa(const SdpaProblem& problem);

}  // namespace surogate::cuda
