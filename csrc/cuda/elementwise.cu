// Elementwise ops: activations and their gradients, SwiGLU, sums, products, multiples.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

// out[0..kOut) = fn(in[0..kIn)) at every place. Operands may share storage: a thread reads its pack before it writes.
template <int kIn, int kOut>
struct Operands {
    const void* in[kIn];
    void* out[kOut];
    Rows in_rows[kIn], out_rows[kOut];
};

template <typename T, int kSize, int kIn, int kOut, typename Fn>
__global__ void __launch_bounds__(kThreads) map(Operands<kIn, kOut> o, Plane plane, Fn fn) {
    const int64_t packs = plane.width / kSize;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= plane.rows * packs) return;
    const int64_t row = plane.rows == 1 ? 0 : index / packs;
    const int64_t column = (index - row * packs) * kSize;
    float x[kIn][kSize], y[kOut][kSize];
#pragma unroll
    for (int i = 0; i < kIn; ++i) load<kSize>(static_cast<const T*>(o.in[i]) + o.in_rows[i][row] + column, x[i]);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
        float in[kIn], out[kOut];
#pragma unroll
        for (int i = 0; i < kIn; ++i) in[i] = x[i][e];
        fn(in, out);
#pragma unroll
        for (int i = 0; i < kOut; ++i) y[i][e] = out[i];
    }
#pragma unroll
    for (int i = 0; i < kOut; ++i) store<kSize>(static_cast<T*>(o.out[i]) + o.out_rows[i][row] + column, y[i]);
}

template <int kIn, int kOut, typename Fn>
void run(const Call& call, const Fn& fn) {
    Plane plane{1, call.in[0].numel()};
    bool dense = true;
    for (int i = 0; i < kIn; ++i) dense = dense && call.in[static_cast<size_t>(i)].contiguous();
    for (int i = 0; i < kOut; ++i) dense = dense && call.out[static_cast<size_t>(i)].contiguous();
    if (!dense) plane = {call.in[0].rows(), width_of(call.in[0])};
    Operands<kIn, kOut> o;
    bool packed = true;
    for (int i = 0; i < kIn; ++i) {
        const Tensor& t = call.in[static_cast<size_t>(i)];
        o.in[i] = t.data;
        o.in_rows[i] = rows_in(plane, t);
        packed = packed && packs_in(plane, t, 8);
    }
    for (int i = 0; i < kOut; ++i) {
        const Tensor& t = call.out[static_cast<size_t>(i)];
        o.out[i] = t.data;
        o.out_rows[i] = rows_in(plane, t);
        packed = packed && packs_in(plane, t, 8);
    }
    with_float(call.in[0].dtype, [&](auto kind) {
        using T = decltype(kind);
        if (packed) {
            map<T, 8, kIn, kOut>
                <<<blocks_for(plane.rows * (plane.width / 8)), kThreads, 0, stream_of(call)>>>(o, plane, fn);
        } else {
            map<T, 1, kIn, kOut><<<blocks_for(plane.rows * plane.width), kThreads, 0, stream_of(call)>>>(o, plane, fn);
        }
    });
    check_launch("elementwise");
}

__device__ float sigmoid(float x) { return 1.0F / (1.0F + __expf(-x)); }

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
        const float density = 0.3989422804014327F * expf(-0.5F * x[1] * x[1]);
        y[0] = x[0] * (normcdff(x[1]) + x[1] * density);
    }
};
constexpr float kRoot = 0.7978845608028654F, kCubic = 0.044715F;  // sqrt(2 / pi)
struct GeluTanh {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const {
        y[0] = 0.5F * x[0] * (1.0F + tanhf(kRoot * (x[0] + kCubic * x[0] * x[0] * x[0])));
    }
};
struct GeluTanhBackward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const {
        const float a = x[1], t = tanhf(kRoot * (a + kCubic * a * a * a));
        y[0] = x[0] * 0.5F * (1.0F + t + a * (1.0F - t * t) * kRoot * (1.0F + 3.0F * kCubic * a * a));
    }
};
struct Relu {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] > 0.0F ? x[0] : 0.0F * x[0]; }
};
struct ReluBackward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const { y[0] = x[1] > 0.0F ? x[0] : 0.0F; }
};
struct Tanh {
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = tanhf(x[0]); }
};
struct TanhBackward {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const {
        const float t = tanhf(x[1]);
        y[0] = x[0] * (1.0F - t * t);
    }
};
struct SwiGLU {
    __device__ void operator()(const float (&x)[2], float (&y)[1]) const { y[0] = x[0] * sigmoid(x[0]) * x[1]; }
};
struct SwiGLUBackward {
    __device__ void operator()(const float (&x)[3], float (&y)[2]) const {
        const float s = sigmoid(x[1]);
        y[0] = x[0] * x[2] * s * (1.0F + x[1] * (1.0F - s));
        y[1] = x[0] * x[1] * s;
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
