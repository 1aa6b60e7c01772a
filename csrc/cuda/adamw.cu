// adamw (surogate/ops/adamw.py): one pass over all weights of a group.
#include "cuda/common.cuh"
#include "cuda/philox.cuh"

namespace surogate::cuda {

namespace {

struct Update {
    void* p;
    float *g, *m, *v, *master;
    const float *lr, *correction1, *correction2, *scale;
    const int64_t* seed;
    int64_t n, salt;
    double weight_decay;
    float beta1, rest1, beta2, rest2, eps;
};

__device__ inline bf16 round_stochastically(float x, uint32_t word) {
    const uint32_t bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
    const uint32_t high = is_nan ? (bits >> 16) | 0x40U : (bits + (word >> 16)) >> 16;
    return __ushort_as_bfloat16(static_cast<unsigned short>(high));
}

// Four neighbours a thread. kKind: 0 f32, 1 bf16 with an f32 master, 2 bf16 rounded stochastically.
template <int kKind>
__global__ void __launch_bounds__(kThreads) step(Update u) {
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
    if (first >= u.n) return;
    const double lr = *u.lr;
    const float keep = static_cast<float>(1.0 - lr * u.weight_decay);
    const float rate = static_cast<float>(lr / static_cast<double>(*u.correction1));
    const float root2 = sqrtf(*u.correction2), scale = *u.scale;
    uint4 words{};
    if constexpr (kKind == 2) {
        words = philox(static_cast<uint64_t>(first / 4), static_cast<uint64_t>(u.salt), static_cast<uint64_t>(*u.seed));
    }
    const int count = u.n - first >= 4 ? 4 : static_cast<int>(u.n - first);
    float p[4] = {}, g[4] = {}, m[4] = {}, v[4] = {};
    const float zeros[4] = {};
    auto* wide = static_cast<float*>(u.p);
    auto* thin = static_cast<bf16*>(u.p);
    auto value = [&](int e) {
        const float gradient = g[e] * scale;
        m[e] = u.beta1 * m[e] + u.rest1 * gradient;
        v[e] = u.beta2 * v[e] + u.rest2 * gradient * gradient;
        return p[e] * keep - rate * m[e] / (sqrtf(v[e]) / root2 + u.eps);
    };
    if (count == 4) {
        load<4>(u.g + first, g);
        load<4>(u.m + first, m);
        load<4>(u.v + first, v);
        if constexpr (kKind == 0) load<4>(wide + first, p);
        if constexpr (kKind == 1) load<4>(u.master + first, p);
        if constexpr (kKind == 2) load<4>(thin + first, p);
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] = value(e);
        store<4>(u.g + first, zeros);
        store<4>(u.m + first, m);
        store<4>(u.v + first, v);
        if constexpr (kKind == 0) store<4>(wide + first, p);
        if constexpr (kKind == 1) {
            store<4>(u.master + first, p);
            store<4>(thin + first, p);
        }
        if constexpr (kKind == 2) {
            Pack<bf16, 4> rounded;
#pragma unroll
            for (int e = 0; e < 4; ++e) rounded.items[e] = round_stochastically(p[e], word(words, e));
            *reinterpret_cast<Pack<bf16, 4>*>(thin + first) = rounded;
        }
        return;
    }
    for (int e = 0; e < count; ++e) {
        const int64_t i = first + e;
        g[e] = u.g[i], m[e] = u.m[i], v[e] = u.v[i];
        p[e] = kKind == 0 ? wide[i] : kKind == 1 ? u.master[i] : widen(thin[i]);
        p[e] = value(e);
        u.g[i] = 0.0F, u.m[i] = m[e], u.v[i] = v[e];
        if constexpr (kKind == 0) wide[i] = p[e];
        if constexpr (kKind == 1) u.master[i] = p[e], thin[i] = narrow<bf16>(p[e]);
        if constexpr (kKind == 2) thin[i] = round_stochastically(p[e], word(words, e));
    }
}

void adamw(const Call& call) {
    const Tensor &p = call.in[0], &master = call.in[8], &seed = call.in[9];
    for (size_t i : {size_t{0}, size_t{1}, size_t{2}, size_t{3}, size_t{8}}) {
        const Tensor& t = call.in[i];
        if (t && (!t.contiguous() || reinterpret_cast<uintptr_t>(t.data) % 16 != 0)) {
            throw std::invalid_argument("adamw needs dense tensors that begin at multiples of 16 bytes");
        }
    }
    const double beta1 = call.attrs.real("beta1"), beta2 = call.attrs.real("beta2");
    Update u{};
    u.p = p.data, u.g = call.in[1].as<float>(), u.m = call.in[2].as<float>(), u.v = call.in[3].as<float>();
    u.master = master.as<float>(), u.seed = seed.as<int64_t>();
    u.lr = call.in[4].as<float>(), u.correction1 = call.in[5].as<float>();
    u.correction2 = call.in[6].as<float>(), u.scale = call.in[7].as<float>();
    u.n = p.numel(), u.salt = call.attrs.integer("salt"), u.weight_decay = call.attrs.real("weight_decay");
    u.beta1 = static_cast<float>(beta1), u.rest1 = static_cast<float>(1.0 - beta1);
    u.beta2 = static_cast<float>(beta2), u.rest2 = static_cast<float>(1.0 - beta2);
    u.eps = static_cast<float>(call.attrs.real("eps"));
    const unsigned blocks = blocks_for(divide_up(u.n, 4));
    if (p.dtype == DType::f32) {
        step<0><<<blocks, kThreads, 0, stream_of(call)>>>(u);
    } else if (master) {
        step<1><<<blocks, kThreads, 0, stream_of(call)>>>(u);
    } else if (seed) {
        step<2><<<blocks, kThreads, 0, stream_of(call)>>>(u);
    } else {
        throw std::invalid_argument("adamw: bf16 takes a master or a seed");
    }
    check_launch("adamw");
}

SUROGATE_CUDA_KERNEL("adamw", adamw);

}  // namespace

}  // namespace surogate::cuda
