// Elementwise ops: activations and their gradients, SwiGLU, sums, products, multiples (surogate/ops/activations.py,
// swiglu.py, elementwise.py). Results may take the storage of operands: a thread reads all its packs before it writes.
#include <utility>

#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

// Packs a thread has in flight of every operand, a block's width apart.
constexpr int kUnroll = 2;

// out[0..kOut) = fn(in[0..kIn)) at every place.
template <int kIn, int kOut>
struct Operands {
    const void* in[kIn];
    void* out[kOut];
    Rows in_rows[kIn], out_rows[kOut];
    Walk walk;
};

template <typename T, int kSize, int kIn, int kOut, typename Fn>
__global__ void __launch_bounds__(kThreads) map(Operands<kIn, kOut> o, Fn fn) {
    using P = Pack<T, kSize>;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
    P x[kUnroll][kIn];
    Place places[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        const int64_t pack = first + u * kThreads;
        if (pack >= o.walk.packs) break;
        places[u] = Place(o.walk, pack, kSize);
#pragma unroll
        for (int i = 0; i < kIn; ++i) x[u][i] = P::at(static_cast<const T*>(o.in[i]) + places[u].in(o.in_rows[i]));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads >= o.walk.packs) return;
        P y[kOut];
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
            float in[kIn], out[kOut];
#pragma unroll
            for (int i = 0; i < kIn; ++i) in[i] = x[u][i][e];
            fn(in, out);
#pragma unroll
            for (int i = 0; i < kOut; ++i) y[i].set(e, out[i]);
        }
#pragma unroll
        for (int i = 0; i < kOut; ++i) y[i].put(static_cast<T*>(o.out[i]) + places[u].in(o.out_rows[i]));
    }
}

template <int kIn, int kOut, typename Fn, size_t... kInputs, size_t... kOutputs>
void run(const Call& call, const Fn& fn, std::index_sequence<kInputs...>, std::index_sequence<kOutputs...>) {
    const Walk walk(call.in[kInputs]..., call.out[kOutputs]...);
    const DType dtype = call.in[0].dtype;
    (expect_dtype(call.in[kInputs], dtype, "an operand"), ...);
    (expect_dtype(call.out[kOutputs], dtype, "a result"), ...);
    if (walk.packs == 0) return;
    const Operands<kIn, kOut> o{{call.in[kInputs].data...},
                                {call.out[kOutputs].data...},
                                {walk.rows(call.in[kInputs])...},
                                {walk.rows(call.out[kOutputs])...},
                                walk};
    const unsigned blocks = blocks_for(walk.packs, kThreads * kUnroll);
    with_float(dtype, [&](auto kind) {
        using T = decltype(kind);
        if (walk.size == kPack) {
            map<T, kPack, kIn, kOut, Fn><<<blocks, kThreads, 0, stream_of(call)>>>(o, fn);
        } else {
            map<T, 1, kIn, kOut, Fn><<<blocks, kThreads, 0, stream_of(call)>>>(o, fn);
        }
    });
    check_launch("an elementwise kernel");
}

template <int kIn, int kOut, typename Fn>
void run(const Call& call, const Fn& fn) {
    run<kIn, kOut>(call, fn, std::make_index_sequence<kIn>{}, std::make_index_sequence<kOut>{});
}

// Two instructions of the special function unit; right in both tails, and within 2e-6 of it where it is not small.
__device__ inline float sigmoid(float x) { return __fdividef(1.0F, 1.0F + __expf(-x)); }

struct Silu {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] * sigmoid(x[0]); }
};
struct SiluBackward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const {
        const float s = sigmoid(x[1]);
        y[0] = x[0] * s * (1.0F + x[1] * (1.0F - s));
    }
};
struct Gelu {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] * normcdff(x[0]); }
};
struct GeluBackward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const {
        const float density = 0.39894228F * __expf(-0.5F * x[1] * x[1]);  // 1 / sqrt(2 pi)
        y[0] = x[0] * (normcdff(x[1]) + x[1] * density);
    }
};
// gelu_tanh(x) = x * (1 + tanh(u)) / 2 = x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 x^3).
constexpr float kGeluLinear = 1.5957691F;   // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.071354816F;  // 0.044715 times that
struct GeluTanh {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const {
        y[0] = x[0] * sigmoid(x[0] * (kGeluLinear + kGeluCubic * x[0] * x[0]));
    }
};
struct GeluTanhBackward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const {
        const float a = x[1], s = sigmoid(a * (kGeluLinear + kGeluCubic * a * a));
        y[0] = x[0] * (s + a * s * (1.0F - s) * (kGeluLinear + 3.0F * kGeluCubic * a * a));
    }
};
struct Relu {
    // Written so that a NaN passes through.
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] < 0.0F ? 0.0F : x[0]; }
};
struct ReluBackward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const { y[0] = x[0] * (x[1] > 0.0F ? 1.0F : 0.0F); }
};
struct Tanh {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = tanhf(x[0]); }
};
struct TanhBackward {
    // 1 - tanh^2 without the cancellation of large x.
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const {
        const float e = __expf(-2.0F * fabsf(x[1])), r = __fdividef(1.0F, 1.0F + e);
        y[0] = x[0] * (4.0F * e * r * r);
    }
};
struct SwiGLU {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const { y[0] = x[0] * sigmoid(x[0]) * x[1]; }
};
struct SwiGLUBackward {
    __device__ void operator()(const float (&x)[3], float (&y)[2]) const {
        const float dy = x[0], gate = x[1], s = sigmoid(gate);
        y[0] = dy * x[2] * s * (1.0F + gate * (1.0F - s));
        y[1] = dy * gate * s;
    }
};
struct Add {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const { y[0] = x[0] + x[1]; }
};
struct Mul {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const { y[0] = x[0] * x[1]; }
};
struct Scale {
    float alpha;
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = alpha * x[0]; }
};

template <int kIn, int kOut, typename Fn>
void op(const Call& call) {
    run<kIn, kOut>(call, Fn{});
}

void scale(const Call& call) { run<1, 1>(call, Scale{static_cast<float>(call.attrs.real("alpha"))}); }

SUROGATE_CUDA_KERNEL("silu", (op<1, 1, Silu>));
SUROGATE_CUDA_KERNEL("silu_backward", (op<2, 1, SiluBackward>));
SUROGATE_CUDA_KERNEL("gelu", (op<1, 1, Gelu>));
SUROGATE_CUDA_KERNEL("gelu_backward", (op<2, 1, GeluBackward>));
SUROGATE_CUDA_KERNEL("gelu_tanh", (op<1, 1, GeluTanh>));
SUROGATE_CUDA_KERNEL("gelu_tanh_backward", (op<2, 1, GeluTanhBackward>));
SUROGATE_CUDA_KERNEL("relu", (op<1, 1, Relu>));
SUROGATE_CUDA_KERNEL("relu_backward", (op<2, 1, ReluBackward>));
SUROGATE_CUDA_KERNEL("tanh", (op<1, 1, Tanh>));
SUROGATE_CUDA_KERNEL("tanh_backward", (op<2, 1, TanhBackward>));
SUROGATE_CUDA_KERNEL("swiglu", (op<2, 1, SwiGLU>));
SUROGATE_CUDA_KERNEL("swiglu_backward", (op<3, 2, SwiGLUBackward>));
SUROGATE_CUDA_KERNEL("add", (op<2, 1, Add>));
SUROGATE_CUDA_KERNEL("mul", (op<2, 1, Mul>));
SUROGATE_CUDA_KERNEL("scale", scale);

}  // namespace

}  // namespace surogate::cuda
