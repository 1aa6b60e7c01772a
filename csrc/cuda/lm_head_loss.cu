// LM head and cross-entropy by chunks of tokens: the chunk's logits are a matrix product in the workspace, one kernel
// turns them into losses and, in place, into the loss's gradient, and two more products carry that to dh and dw.
//
// Logits are stored as h is (bf16 or f32); exponentials, sums and losses are f32, the sum over tokens is f64. Tokens
// without a target cost their share of the products: which they are, only the device knows.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/plugin.h"

namespace surogate::cuda {

namespace {

// As in surogate/ops/lm_head_loss.py and matmul.py.
constexpr int64_t kGemmBytes = int64_t{32} << 20;
constexpr int64_t kRowBytes = 128;  // rows of logits begin at multiples of this
constexpr int64_t kRows = 128;      // chunks are multiples of so many tokens

constexpr int kThreads = 512, kWarps = kThreads / 32;

// Sixteen bytes of logits.
template <typename T>
struct Pack;

template <>
struct Pack<float> {
    static constexpr int kSize = 4;
    float4 bits;
    __device__ void unpack(float* x) const { x[0] = bits.x, x[1] = bits.y, x[2] = bits.z, x[3] = bits.w; }
    __device__ void pack(const float* x) { bits = make_float4(x[0], x[1], x[2], x[3]); }
};

template <>
struct Pack<__nv_bfloat16> {
    static constexpr int kSize = 8;
    uint4 bits;
    __device__ void unpack(float* x) const {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
        }
    }
    __device__ void pack(const float* x) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
            words[i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        bits = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// The largest of some numbers, and the sum of exp(x - largest).
struct Softmax {
    float top = -INFINITY, sum = 0.0F;

    __device__ void join(float other_top, float other_sum) {
        const float higher = fmaxf(top, other_top);
        if (higher == -INFINITY) return;  // nothing yet on either side
        sum = sum * __expf(top - higher) + other_sum * __expf(other_top - higher);
        top = higher;
    }
};

// Joined over the block, in a fixed order; every thread gets the result.
__device__ Softmax join_block(Softmax mine) {
    __shared__ float tops[kWarps], sums[kWarps];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        mine.join(__shfl_xor_sync(0xffffffffU, mine.top, lane), __shfl_xor_sync(0xffffffffU, mine.sum, lane));
    }
    if (threadIdx.x % 32 == 0) {
        tops[threadIdx.x / 32] = mine.top;
        sums[threadIdx.x / 32] = mine.sum;
    }
    __syncthreads();
    Softmax all;
    for (int warp = 0; warp < kWarps; ++warp) all.join(tops[warp], sums[warp]);
    return all;
}

// A block a token. loss = log sum exp - logit of the target; with kGradient, the logits become
// loss_scale * (softmax - [target]), zeros for a token without a target. A target beyond the vocabulary makes the loss
// NaN, which stops the step.
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kThreads)
    softmax_loss(T* logits, int64_t row_size, int vocabulary, const int32_t* targets, const float* loss_scale,
                 float* losses) {
    using P = Pack<T>;
    constexpr int kSize = P::kSize;
    T* row = logits + static_cast<int64_t>(blockIdx.x) * row_size;
    P* packs = reinterpret_cast<P*>(row);
    const int target = targets[blockIdx.x];
    const int full = vocabulary / kSize, all = (vocabulary + kSize - 1) / kSize;  // the last pack may be part padding
    float x[kSize];

    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0F;
        if (kGradient) {
#pragma unroll
            for (float& e : x) e = 0.0F;
            for (int i = static_cast<int>(threadIdx.x); i < all; i += kThreads) packs[i].pack(x);
        }
        return;
    }

    Softmax mine;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kThreads) {
        packs[i].unpack(x);
        if (i >= full) {
#pragma unroll
            for (int e = 0; e < kSize; ++e) {
                if (i * kSize + e >= vocabulary) x[e] = -INFINITY;
            }
        }
        float top = x[0];
#pragma unroll
        for (int e = 1; e < kSize; ++e) top = fmaxf(top, x[e]);
        const float higher = fmaxf(mine.top, top);
        float sum = 0.0F;
#pragma unroll
        for (int e = 0; e < kSize; ++e) sum += __expf(x[e] - higher);
        mine.sum = mine.sum * __expf(mine.top - higher) + sum;
        mine.top = higher;
    }
    const Softmax whole = join_block(mine);
    const float lse = whole.top + logf(whole.sum);
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = target < vocabulary ? lse - static_cast<float>(row[target]) : NAN;
    }
    if (!kGradient) return;
    __syncthreads();  // thread 0 has read the target's logit

    const float scale = *loss_scale;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kThreads) {
        packs[i].unpack(x);
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
            const float p = __expf(x[e] - lse) - (i * kSize + e == target ? 1.0F : 0.0F);
            x[e] = p * scale;
        }
        packs[i].pack(x);
    }
}

// *loss = *acc + sum of losses; one block, so that the order is fixed.
__global__ void __launch_bounds__(1024) sum_losses(const float* losses, int64_t n, const double* acc, double* loss) {
    __shared__ double partial[1024];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += 1024) sum += static_cast<double>(losses[i]);
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 512; half > 0; half /= 2) {
        if (static_cast<int>(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *loss = (acc != nullptr ? *acc : 0.0) + partial[0];
}

// The products of one instruction in the order in which they run.
struct Products {
    std::vector<std::shared_ptr<GemmPlan>> plans;
};

// Runs one product after the other, with the plans of the first time.
class Runner {
   public:
    explicit Runner(const Call& call, void* workspace) : stream_(stream_of(call)), workspace_(workspace) {
        if (!*call.state) *call.state = std::make_shared<Products>();
        products_ = std::static_pointer_cast<Products>(*call.state);
    }
    void run(const Gemm& gemm, const void* a, const void* b, void* y) {
        GemmOperands operands{a, b, nullptr, y, workspace_, kGemmBytes};
        if (next_ == products_->plans.size()) products_->plans.push_back(plan_gemm(gemm, operands, stream_));
        products_->plans[next_++]->run(1.0F, operands, stream_);
    }

   private:
    cudaStream_t stream_;
    void* workspace_;
    std::shared_ptr<Products> products_;
    size_t next_ = 0;
};

struct Operands {
    Tensor h, w, targets, loss_scale, acc_loss, acc_dw;
    Tensor loss, dh, dw;
    bool gradient;
};

template <typename T>
void launch_softmax(const Operands& x, void* logits, int64_t row_size, int64_t first, int64_t rows, float* losses,
                    cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(rows);
    const auto vocabulary = static_cast<int>(x.w.dim(0));
    const int32_t* targets = x.targets.as<int32_t>() + first;
    if (x.gradient) {
        softmax_loss<T, true><<<blocks, kThreads, 0, stream>>>(static_cast<T*>(logits), row_size, vocabulary, targets,
                                                               x.loss_scale.as<float>(), losses + first);
    } else {
        softmax_loss<T, false><<<blocks, kThreads, 0, stream>>>(static_cast<T*>(logits), row_size, vocabulary, targets,
                                                                nullptr, losses + first);
    }
    check(cudaGetLastError(), "softmax and loss");
}

int64_t leading(const Tensor& t) { return t.dim(0) == 1 ? t.dim(1) : t.stride[0]; }

void* row_of(const Tensor& t, int64_t row) {
    return t.as<char>() + row * t.stride[0] * static_cast<int64_t>(size_of(t.dtype));
}

void run(const Call& call, const Operands& x) {
    if (x.h.dtype != x.w.dtype) throw std::invalid_argument("h and w must have one dtype: cast one");
    const auto size = static_cast<int64_t>(size_of(x.h.dtype));
    const int64_t tokens = x.h.dim(0), dim = x.h.dim(1), vocabulary = x.w.dim(0);
    const int64_t row_size = (vocabulary * size + kRowBytes - 1) / kRowBytes * kRowBytes / size;
    cudaStream_t stream = stream_of(call);

    Scratch scratch(call.workspace);
    auto losses = static_cast<float*>(scratch.take(tokens * 4, "losses"));
    Runner products(call, scratch.take(kGemmBytes, "the products of the LM head"));
    int64_t left = 0;
    void* logits = scratch.rest(&left);
    // As many rows as fit, in equal chunks.
    int64_t rows = std::min(tokens, left / (row_size * size));
    if (rows < tokens) rows = rows / kRows * kRows;
    if (rows == 0) throw std::runtime_error("the workspace holds no chunk of logits");
    const int64_t chunks = (tokens + rows - 1) / rows;
    if (chunks > 1) rows = ((tokens + chunks - 1) / chunks + kRows - 1) / kRows * kRows;

    for (int64_t first = 0; first < tokens; first += rows) {
        const int64_t n = std::min(rows, tokens - first);
        void* h = row_of(x.h, first);
        products.run({.tb = true,
                      .m = n,
                      .n = vocabulary,
                      .k = dim,
                      .in = x.h.dtype,
                      .out = x.h.dtype,
                      .lda = leading(x.h),
                      .ldb = leading(x.w),
                      .ldy = row_size},
                     h, x.w.data, logits);
        if (x.h.dtype == DType::bf16) {
            launch_softmax<__nv_bfloat16>(x, logits, row_size, first, n, losses, stream);
        } else {
            launch_softmax<float>(x, logits, row_size, first, n, losses, stream);
        }
        // dw first: dh may take the storage of h.
        if (x.dw) {
            products.run({.ta = true,
                          .m = vocabulary,
                          .n = dim,
                          .k = n,
                          .in = x.h.dtype,
                          .out = x.dw.dtype,
                          .lda = row_size,
                          .ldb = leading(x.h),
                          .ldy = leading(x.dw),
                          .accumulate = first > 0 || static_cast<bool>(x.acc_dw)},
                         logits, h, x.dw.data);
        }
        if (x.dh) {
            products.run({.m = n,
                          .n = dim,
                          .k = vocabulary,
                          .in = x.h.dtype,
                          .out = x.dh.dtype,
                          .lda = row_size,
                          .ldb = leading(x.w),
                          .ldy = leading(x.dh)},
                         logits, x.w.data, row_of(x.dh, first));
        }
    }
    sum_losses<<<1, 1024, 0, stream>>>(losses, tokens, x.acc_loss.as<double>(), x.loss.as<double>());
    check(cudaGetLastError(), "summing losses");
}

// h, w, targets, acc_loss? -> loss
void lm_head_loss(const Call& call) {
    run(call, {call.in[0], call.in[1], call.in[2], {}, call.in[3], {}, call.out[0], {}, {}, false});
}

// h, w, targets, loss_scale, acc_loss?, acc_dw? -> loss, dh, dw?
void lm_head_loss_grad(const Call& call) {
    run(call, {call.in[0], call.in[1], call.in[2], call.in[3], call.in[4], call.in[5], call.out[0], call.out[1],
               call.out[2], true});
}

SUROGATE_CUDA_KERNEL("lm_head_loss", lm_head_loss);
SUROGATE_CUDA_KERNEL("lm_head_loss_grad", lm_head_loss_grad);

}  // namespace

}  // namespace surogate::cuda
