// A warp has one row of the result; its lanes share the row's elements, element lane + 32 i in register i. Every sum
// has a fixed order.
#include <cuda_bf16.h>

#include <stdexcept>

#include "cuda/attention_plain.h"
#include "cuda/plugin.h"

namespace surogate::cuda {

namespace {

constexpr int kWarp = 32, kWarps = 4;
constexpr int kMostDim = 256, kRegisters = kMostDim / kWarp;

__device__ float load(const float* p) { return *p; }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float x) { *p = x; }
__device__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16(x); }

// A row of a tensor in the registers of a warp.
struct Row {
    float x[kRegisters];

    __device__ Row() {
        for (float& e : x) e = 0.0F;
    }
    template <typename T>
    static __device__ Row of(const Tensor& t, int64_t token, int64_t head) {
        Row row;
        const T* p = static_cast<const T*>(t.data) + token * t.stride[0] + head * t.stride[1];
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) {
            const int e = static_cast<int>(threadIdx.x) + kWarp * i;
            if (e < t.shape[2]) row.x[i] = load(p + e);
        }
        return row;
    }
    template <typename T>
    __device__ void write(const Tensor& t, int64_t token, int64_t head) const {
        T* p = static_cast<T*>(t.data) + token * t.stride[0] + head * t.stride[1];
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) {
            const int e = static_cast<int>(threadIdx.x) + kWarp * i;
            if (e < t.shape[2]) store(p + e, x[i]);
        }
    }
    __device__ float dot(const Row& other) const {
        float sum = 0.0F;
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) sum += x[i] * other.x[i];
#pragma unroll
        for (int lane = kWarp / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, lane);
        return sum;
    }
    __device__ void add(float factor, const Row& other) {
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) x[i] += factor * other.x[i];
    }
    __device__ void multiply(float factor) {
#pragma unroll
        for (float& e : x) e *= factor;
    }
};

// The document of a token: the last boundary that is not beyond it.
__device__ int document_of(const int32_t* cu_seqlens, int documents, int64_t token) {
    int low = 0, high = documents - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (cu_seqlens[middle] <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// The warp's row: a token and a head.
struct Place {
    int64_t token, head;
    __device__ Place(int64_t heads) {
        const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
        token = row / heads;
        head = row % heads;
    }
};

__device__ int64_t first_key(const PlainAttention& a, int64_t token) {
    const int64_t begin = a.cu_seqlens[document_of(a.cu_seqlens, a.documents, token)];
    return a.window > 0 ? max(begin, token - a.window + 1) : begin;
}

template <typename T>
__global__ void forward(PlainAttention a) {
    const Place p(a.q.shape[1]);
    if (p.token >= a.q.shape[0]) return;
    const int64_t kv_head = p.head / (a.q.shape[1] / a.k.shape[1]);
    const Row q = Row::of<T>(a.q, p.token, p.head);
    Row o;
    float top = -INFINITY, sum = 0.0F;
    for (int64_t j = first_key(a, p.token); j <= p.token; ++j) {
        const float s = a.scale * q.dot(Row::of<T>(a.k, j, kv_head));
        const float higher = fmaxf(top, s), keep = expf(top - higher), weight = expf(s - higher);
        sum = sum * keep + weight;
        o.multiply(keep);
        o.add(weight, Row::of<T>(a.v, j, kv_head));
        top = higher;
    }
    o.multiply(1.0F / sum);
    o.write<T>(a.o, p.token, p.head);
    if (threadIdx.x == 0) a.lse[p.head * a.lse_head + p.token * a.lse_token] = top + logf(sum);
}

template <typename T>
__global__ void backward_q(PlainAttention a) {
    const Place p(a.q.shape[1]);
    if (p.token >= a.q.shape[0]) return;
    const int64_t kv_head = p.head / (a.q.shape[1] / a.k.shape[1]);
    const Row q = Row::of<T>(a.q, p.token, p.head), dout = Row::of<T>(a.dout, p.token, p.head);
    const float delta = dout.dot(Row::of<T>(a.o, p.token, p.head));
    const float lse = a.lse[p.head * a.lse_head + p.token * a.lse_token];
    Row dq;
    for (int64_t j = first_key(a, p.token); j <= p.token; ++j) {
        const Row k = Row::of<T>(a.k, j, kv_head);
        const float weight = expf(a.scale * q.dot(k) - lse);
        dq.add(a.scale * weight * (dout.dot(Row::of<T>(a.v, j, kv_head)) - delta), k);
    }
    dq.write<T>(a.dq, p.token, p.head);
}

template <typename T>
__global__ void backward_kv(PlainAttention a) {
    const Place p(a.k.shape[1]);
    if (p.token >= a.k.shape[0]) return;
    const int64_t group = a.q.shape[1] / a.k.shape[1];
    int64_t end = a.cu_seqlens[document_of(a.cu_seqlens, a.documents, p.token) + 1];
    if (a.window > 0) end = min(end, p.token + a.window);
    const Row k = Row::of<T>(a.k, p.token, p.head), v = Row::of<T>(a.v, p.token, p.head);
    Row dk, dv;
    for (int64_t head = p.head * group; head < (p.head + 1) * group; ++head) {
        for (int64_t i = p.token; i < end; ++i) {
            const Row q = Row::of<T>(a.q, i, head), dout = Row::of<T>(a.dout, i, head);
            const float weight = expf(a.scale * q.dot(k) - a.lse[head * a.lse_head + i * a.lse_token]);
            const float delta = dout.dot(Row::of<T>(a.o, i, head));
            dv.add(weight, dout);
            dk.add(a.scale * weight * (dout.dot(v) - delta), q);
        }
    }
    dk.write<T>(a.dk, p.token, p.head);
    dv.write<T>(a.dv, p.token, p.head);
}

unsigned blocks_for(const Tensor& t) { return static_cast<unsigned>((t.dim(0) * t.dim(1) + kWarps - 1) / kWarps); }

void expect_size(const PlainAttention& a) {
    if (a.q.dim(2) > kMostDim) throw std::invalid_argument("attention's head size is above 256");
}

}  // namespace

void plain_attention(const PlainAttention& a, cudaStream_t stream) {
    expect_size(a);
    const dim3 threads(kWarp, kWarps);
    if (a.q.dtype == DType::f32) {
        forward<float><<<blocks_for(a.q), threads, 0, stream>>>(a);
    } else {
        forward<__nv_bfloat16><<<blocks_for(a.q), threads, 0, stream>>>(a);
    }
    check(cudaGetLastError(), "plain attention");
}

void plain_attention_backward(const PlainAttention& a, cudaStream_t stream) {
    expect_size(a);
    const dim3 threads(kWarp, kWarps);
    if (a.q.dtype == DType::f32) {
        backward_q<float><<<blocks_for(a.q), threads, 0, stream>>>(a);
        backward_kv<float><<<blocks_for(a.k), threads, 0, stream>>>(a);
    } else {
        backward_q<__nv_bfloat16><<<blocks_for(a.q), threads, 0, stream>>>(a);
        backward_kv<__nv_bfloat16><<<blocks_for(a.k), threads, 0, stream>>>(a);
    }
    check(cudaGetLastError(), "plain attention's backward pass");
}

}  // namespace surogate::cuda
