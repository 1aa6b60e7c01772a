// adamw_8bit (surogate/ops/adamw_8bit.py): a warp updates a block of 256 elements, eight neighbours a lane, in one pass
// over memory: 16 bytes an element with bf16 weights. Numbers and starts of the searches lie in shared memory.
#include <algorithm>

#include "core/blockwise8.h"
#include "cuda/rounding.cuh"

namespace surogate::cuda {

namespace {

using blockwise8::kBlock;
using blockwise8::kStarts;
using blockwise8::kTable;

struct Update {
    void* p;
    float *g, *master, *absmax_m, *absmax_v;
    uint8_t *m, *v;
    const float *table_m, *table_v, *lr, *correction1, *correction2, *scale;
    const int64_t* seed;
    int64_t blocks, salt;
    double weight_decay;
    float beta1, rest1, beta2, rest2, eps;
};

constexpr int kEach = kBlock / 32;  // elements of a lane

using Wide = Pack<float, kEach>;
using Thin = Pack<bf16, kEach>;
using Bytes = Pack<uint8_t, kEach>;

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, lane));
    return x;
}

// Stores a lane's part of a block of moments, and the block's magnitude.
__device__ inline void encode(const float (&x)[kEach], uint8_t* index, float* absmax, const float* table,
                              const uint8_t* start) {
    float most = 0.0F;
#pragma unroll
    for (int e = 0; e < kEach; ++e) most = fmaxf(most, fabsf(x[e]));
    most = warp_max(most);
    const float inverse = blockwise8::inverse(most);
    Bytes found;
#pragma unroll
    for (int e = 0; e < kEach; ++e) found.items[e] = blockwise8::nearest(__fmul_rn(x[e], inverse), table, start);
    found.put(index);
    if (threadIdx.x % 32 == 0) *absmax = most;
}

template <Kept kKept>
__global__ void __launch_bounds__(kThreads) update_blocks(Update u) {
    __shared__ float table_m[kTable], table_v[kTable];
    __shared__ uint8_t start_m[kStarts], start_v[kStarts];
    for (int i = static_cast<int>(threadIdx.x); i < kTable; i += kThreads) {
        table_m[i] = u.table_m[i];
        table_v[i] = u.table_v[i];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kStarts; i += kThreads) {
        start_m[i] = blockwise8::start_of(i, table_m);
        start_v[i] = blockwise8::start_of(i, table_v);
    }
    __syncthreads();

    const double lr = *u.lr;
    const float keep = static_cast<float>(1.0 - lr * u.weight_decay);
    const float rate = static_cast<float>(lr / static_cast<double>(*u.correction1));
    const float root2 = sqrtf(*u.correction2), scale = *u.scale;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kWarps = kThreads / 32;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; block < u.blocks;
         block += stride) {
        const int64_t first = block * kBlock + lane * kEach;
        float m[kEach], v[kEach];
        auto* wide = static_cast<float*>(u.p) + first;
        auto* thin = static_cast<bf16*>(u.p) + first;
        const Wide old_g = Wide::at(u.g + first);
        const Bytes old_m = Bytes::at(u.m + first), old_v = Bytes::at(u.v + first);
        Wide p;
        Thin rounded;
        if constexpr (kKept == Kept::wide) p = Wide::at(wide);
        if constexpr (kKept == Kept::master) p = Wide::at(u.master + first);
        if constexpr (kKept == Kept::stochastic) {
            rounded = Thin::at(thin);
#pragma unroll
            for (int e = 0; e < kEach; ++e) p.items[e] = rounded[e];
        }
        const float absmax_m = u.absmax_m[block], absmax_v = u.absmax_v[block];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const float gradient = __fmul_rn(old_g.items[e], scale);
            const float held_m = __fmul_rn(table_m[old_m.items[e]], absmax_m);
            const float held_v = __fmul_rn(table_v[old_v.items[e]], absmax_v);
            m[e] = __fmaf_rn(u.rest1, gradient, __fmul_rn(u.beta1, held_m));
            v[e] = __fmaf_rn(__fmul_rn(u.rest2, gradient), gradient, __fmul_rn(u.beta2, held_v));
            p.items[e] = p.items[e] * keep - rate * m[e] / (sqrtf(v[e]) / root2 + u.eps);
        }
        const Wide zeros{};
        zeros.put(u.g + first);
        encode(m, u.m + first, u.absmax_m + block, table_m, start_m);
        encode(v, u.v + first, u.absmax_v + block, table_v, start_v);
        if constexpr (kKept == Kept::wide) p.put(wide);
        if constexpr (kKept == Kept::master) {
            p.put(u.master + first);
#pragma unroll
            for (int e = 0; e < kEach; ++e) rounded.set(e, p.items[e]);
        }
        if constexpr (kKept == Kept::stochastic) {
#pragma unroll
            for (int part = 0; part < kEach; part += 4) {
                const uint4 words = philox(static_cast<uint64_t>((first + part) / 4), static_cast<uint64_t>(u.salt),
                                           static_cast<uint64_t>(*u.seed));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    rounded.items[part + e] = round_stochastically(p.items[part + e], word(words, e));
                }
            }
        }
        if constexpr (kKept != Kept::wide) rounded.put(thin);
    }
}

void adamw_8bit(const Call& call) {
    for (size_t i : {0, 1, 2, 3, 4, 5, 6, 7, 12}) {
        const Tensor& t = call.in[i];
        if (t && (!t.contiguous() || !aligned(t.data, kEach, t.dtype))) {
            throw std::invalid_argument("adamw_8bit needs dense tensors that begin at multiples of eight elements");
        }
    }
    const Tensor &p = call.in[0], &master = call.in[12], &seed = call.in[13];
    const double beta1 = call.attrs.real("beta1"), beta2 = call.attrs.real("beta2");
    Update u{};
    u.p = p.data, u.g = call.in[1].as<float>(), u.m = call.in[2].as<uint8_t>(), u.v = call.in[3].as<uint8_t>();
    u.absmax_m = call.in[4].as<float>(), u.absmax_v = call.in[5].as<float>();
    u.table_m = call.in[6].as<float>(), u.table_v = call.in[7].as<float>();
    u.lr = call.in[8].as<float>(), u.correction1 = call.in[9].as<float>();
    u.correction2 = call.in[10].as<float>(), u.scale = call.in[11].as<float>();
    u.master = master.as<float>(), u.seed = seed.as<int64_t>();
    u.blocks = p.numel() / kBlock, u.salt = call.attrs.integer("salt"),
    u.weight_decay = call.attrs.real("weight_decay");
    u.beta1 = static_cast<float>(beta1), u.rest1 = static_cast<float>(1.0 - beta1);
    u.beta2 = static_cast<float>(beta2), u.rest2 = static_cast<float>(1.0 - beta2);
    u.eps = static_cast<float>(call.attrs.real("eps"));
    if (u.blocks == 0) return;
    // Enough for the largest device; more would only fill more tables.
    const auto grid = static_cast<unsigned>(std::min<int64_t>(divide_up(u.blocks, kThreads / 32), 2048));
    if ((p.dtype == DType::bf16) != (master || seed)) {
        throw std::invalid_argument("adamw_8bit: bf16 takes a master or a seed");
    }
    if (p.dtype != DType::bf16) {
        expect_dtype(p, DType::f32, "a parameter");
        update_blocks<Kept::wide><<<grid, kThreads, 0, stream_of(call)>>>(u);
    } else if (master) {
        update_blocks<Kept::master><<<grid, kThreads, 0, stream_of(call)>>>(u);
    } else {
        update_blocks<Kept::stochastic><<<grid, kThreads, 0, stream_of(call)>>>(u);
    }
    check_launch("adamw_8bit");
}

SUROGATE_CUDA_KERNEL("adamw_8bit", adamw_8bit);

}  // namespace

}  // namespace surogate::cuda
