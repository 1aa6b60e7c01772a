// Matrix products by cuBLASLt: row-major operands, an algorithm chosen once per problem by timing, kept on disk.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "core/tensor.h"

namespace surogate::cuda {

// y[m,n] = alpha * op(a) op(b) + bias[n] + (accumulate ? y : 0), sums in f32. a is stored as [m,k] or, with ta, as
// [k,m]; b as [k,n] or, with tb, as [n,k]; ld: elements from one row in memory to the next. `in` is the dtype of a and
// b, `out` that of y and bias: bf16 gives bf16 or f32, f32 gives f32.
struct Gemm {
    bool ta = false, tb = false;
    int64_t m = 0, n = 0, k = 0;
    DType in = DType::bf16, out = DType::bf16;
    int64_t lda = 0, ldb = 0, ldy = 0;
    bool accumulate = false;
};

struct GemmOperands {
    const void* a = nullptr;
    const void* b = nullptr;
    const void* bias = nullptr;  // null: none
    void* y = nullptr;
    void* workspace = nullptr;  // aligned to 256 bytes
    int64_t workspace_bytes = 0;
};

class GemmPlan {
   public:
    virtual ~GemmPlan() = default;
    // Operands as aligned as those that the plan was made with.
    virtual void run(float alpha, const GemmOperands& operands, cudaStream_t stream) = 0;
};

// Makes the plan of a problem, or finds it. Making it writes y (what it held stays where the product accumulates) and
// waits for the stream, so it must not happen in a capture: call it in an instruction's first run.
//
// Throws std::runtime_error where the library has no algorithm.
std::shared_ptr<GemmPlan> plan_gemm(const Gemm& gemm, const GemmOperands& operands, cudaStream_t stream);

}  // namespace surogate::cuda
