// adamw (surogate/ops/adamw.py): one pass over all weights of a group.
#include "cuda/common.cuh"
#include "cuda/rounding.cuh"

namespace surogate::cuda {

namespace {

struct Update {
    void *p, *m, *v;
    float *g, *master;
    Rows p_rows, g_rows, m_rows, v_rows, master_rows;
    const float *lr, *correction1, *correction2, *scale;
    const int64_t *seed, *moments_seed;
    int64_t count, salt;
    Divider width;  // of a row, where tensors are not dense
    double weight_decay;
    float beta1, rest1, beta2, rest2, eps;
};

// What is the same for all weights, from numbers that the host wrote before the step.
struct Step {
    float keep, rate, root2, scale;

    __device__ explicit Step(const Update& u)
        : keep(static_cast<float>(1.0 - static_cast<double>(*u.lr) * u.weight_decay)),
          rate(static_cast<float>(static_cast<double>(*u.lr) / static_cast<double>(*u.correction1))),
          root2(sqrtf(*u.correction2)),
          scale(*u.scale) {}

    // The weight after the update; m and v are updated where they are.
    __device__ float operator()(const Update& u, float p, float g, float& m, float& v) const {
        const float gradient = g * scale;
        m = u.beta1 * m + u.rest1 * gradient;
        v = u.beta2 * v + u.rest2 * gradient * gradient;
        return p * keep - rate * m / (sqrtf(v) / root2 + u.eps);
    }
};

constexpr int kWords = 4;  // of a Philox block, and elements of a pack

__device__ inline uint4 random_words(const Update& u, int64_t block) {
    return philox(static_cast<uint64_t>(block), static_cast<uint64_t>(u.salt), static_cast<uint64_t>(*u.seed));
}

// The words whose high halves round first moments, and low halves second ones.
__device__ inline uint4 moment_words(const Update& u, int64_t block) {
    const uint64_t salt = static_cast<uint64_t>(u.salt) + (uint64_t{1} << 32);
    return philox(static_cast<uint64_t>(block), salt, static_cast<uint64_t>(*u.moments_seed));
}

// A moment as it is stored: bf16 is rounded by the high half of the word.
template <typename Moment>
__device__ Moment kept_moment(float x, uint32_t word) {
    if constexpr (std::is_same_v<Moment, bf16>) {
        return round_stochastically(x, word);
    } else {
        return x;
    }
}

// One element.
template <Kept kKept, typename Moment>
__device__ void update_one(const Update& u, const Step& step, uint32_t row, int64_t column, uint32_t word,
                           uint32_t moment_word) {
    float* g = u.g + u.g_rows[row] + column;
    Moment *m = static_cast<Moment*>(u.m) + u.m_rows[row] + column,
           *v = static_cast<Moment*>(u.v) + u.v_rows[row] + column;
    float* master = kKept == Kept::master ? u.master + u.master_rows[row] + column : nullptr;
    const int64_t at = u.p_rows[row] + column;
    auto* wide = static_cast<float*>(u.p) + at;
    auto* thin = static_cast<bf16*>(u.p) + at;
    float m_new = widen(*m), v_new = widen(*v);
    const float old = kKept == Kept::wide ? *wide : kKept == Kept::master ? *master : widen(*thin);
    const float p = step(u, old, *g, m_new, v_new);
    *g = 0.0F;
    *m = kept_moment<Moment>(m_new, moment_word), *v = kept_moment<Moment>(v_new, moment_word << 16);
    if constexpr (kKept == Kept::wide) *wide = p;
    if constexpr (kKept == Kept::master) *master = p, *thin = narrow<bf16>(p);
    if constexpr (kKept == Kept::stochastic) *thin = round_stochastically(p, word);
}

// Dense and aligned: packs of four, kUnroll of them a thread.
template <Kept kKept, typename Moment>
__global__ void __launch_bounds__(kThreads) update_packs(Update u) {
    using Wide = Pack<float, kWords>;
    using Moments = Pack<Moment, kWords>;
    constexpr bool kRoundMoments = std::is_same_v<Moment, bf16>;
    using Thin = Pack<bf16, kWords>;
    constexpr int kUnroll = 2;
    const Step step(u);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
    auto* wide = static_cast<float*>(u.p);
    auto* thin = static_cast<bf16*>(u.p);
    auto *all_m = static_cast<Moment*>(u.m), *all_v = static_cast<Moment*>(u.v);
    Wide g[kUnroll], p[kUnroll];
    Moments m[kUnroll], v[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
        const int64_t i = (first + k * kThreads) * kWords;
        if (i + kWords > u.count) continue;
        g[k] = Wide::at(u.g + i), m[k] = Moments::at(all_m + i), v[k] = Moments::at(all_v + i);
        if constexpr (kKept == Kept::wide) p[k] = Wide::at(wide + i);
        if constexpr (kKept == Kept::master) p[k] = Wide::at(u.master + i);
        if constexpr (kKept == Kept::stochastic) {
            const Thin narrow = Thin::at(thin + i);
#pragma unroll
            for (int e = 0; e < kWords; ++e) p[k].items[e] = narrow[e];
        }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
        const int64_t i = (first + k * kThreads) * kWords;
        if (i >= u.count) return;
        uint4 words{}, for_moments{};
        if constexpr (kKept == Kept::stochastic) words = random_words(u, i / kWords);
        if constexpr (kRoundMoments) for_moments = moment_words(u, i / kWords);
        if (i + kWords > u.count) {  // the last elements
            for (int e = 0; i + e < u.count; ++e) {
                update_one<kKept, Moment>(u, step, 0, i + e, word(words, e), word(for_moments, e));
            }
            return;
        }
#pragma unroll
        for (int e = 0; e < kWords; ++e) {
            float m_new = m[k][e], v_new = v[k][e];
            p[k].items[e] = step(u, p[k].items[e], g[k].items[e], m_new, v_new);
            m[k].items[e] = kept_moment<Moment>(m_new, word(for_moments, e));
            v[k].items[e] = kept_moment<Moment>(v_new, word(for_moments, e) << 16);
            g[k].items[e] = 0.0F;
        }
        g[k].put(u.g + i), m[k].put(all_m + i), v[k].put(all_v + i);
        if constexpr (kKept == Kept::wide) {
            p[k].put(wide + i);
        } else {
            Thin narrow;
            if constexpr (kKept == Kept::master) p[k].put(u.master + i);
#pragma unroll
            for (int e = 0; e < kWords; ++e) {
                if constexpr (kKept == Kept::master) narrow.set(e, p[k].items[e]);
                if constexpr (kKept == Kept::stochastic) {
                    narrow.items[e] = round_stochastically(p[k].items[e], word(words, e));
                }
            }
            narrow.put(thin + i);
        }
    }
}

// Any strides and addresses, an element a thread.
template <Kept kKept, typename Moment>
__global__ void __launch_bounds__(kThreads) update_elements(Update u) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= u.count) return;
    const uint32_t row = u.width.quotient(static_cast<uint32_t>(i));
    const int at = static_cast<int>(i % kWords);
    uint32_t mine = 0, for_moments = 0;
    if constexpr (kKept == Kept::stochastic) mine = word(random_words(u, i / kWords), at);
    if constexpr (std::is_same_v<Moment, bf16>) for_moments = word(moment_words(u, i / kWords), at);
    update_one<kKept, Moment>(u, Step(u), row, i - int64_t{row} * u.width.divisor(), mine, for_moments);
}

template <Kept kKept, typename Moment>
void launch(const Call& call, const Update& u, bool packed) {
    if (packed) {
        update_packs<kKept, Moment>
            <<<blocks_for(divide_up(u.count, kWords), kThreads * 2), kThreads, 0, stream_of(call)>>>(u);
    } else {
        if (u.count > INT32_MAX) throw std::invalid_argument("tensors are too large for weights that are not dense");
        update_elements<kKept, Moment><<<blocks_for(u.count), kThreads, 0, stream_of(call)>>>(u);
    }
    check_launch("adamw");
}

void adamw(const Call& call) {
    const Tensor &p = call.in[0], &g = call.in[1], &m = call.in[2], &v = call.in[3];
    const Tensor &master = call.in[8], &seed = call.in[9];
    const Tensor moments_seed = call.in.size() > 10 ? call.in[10] : Tensor{};
    for (const Tensor* t : {&g, &master}) expect_dtype(*t, DType::f32, "a gradient or master");
    if (v.dtype != m.dtype) throw std::invalid_argument("adamw: moments of two dtypes");
    if ((m.dtype == DType::bf16) != static_cast<bool>(moments_seed)) {
        throw std::invalid_argument("adamw: bf16 moments take a seed");
    }
    if (p.numel() == 0) return;
    bool dense = true, packed = true;
    for (const Tensor* t : {&p, &g, &m, &v, &master}) {
        dense = dense && (!*t || t->contiguous());
        packed = packed && aligned(t->data, kWords, t->dtype);
    }
    auto rows = [&](const Tensor& t) { return dense ? Rows() : Rows(t); };
    const double beta1 = call.attrs.real("beta1"), beta2 = call.attrs.real("beta2");
    Update u{};
    u.p = p.data, u.g = g.as<float>(), u.m = m.data, u.v = v.data, u.master = master.as<float>();
    u.p_rows = rows(p), u.g_rows = rows(g), u.m_rows = rows(m), u.v_rows = rows(v), u.master_rows = rows(master);
    u.lr = call.in[4].as<float>(), u.correction1 = call.in[5].as<float>();
    u.correction2 = call.in[6].as<float>(), u.scale = call.in[7].as<float>(), u.seed = seed.as<int64_t>();
    u.moments_seed = moments_seed.as<int64_t>();
    u.count = p.numel(), u.salt = call.attrs.integer("salt");
    if (!(dense && packed)) u.width = Divider(dense ? u.count : width_of(p));
    u.weight_decay = call.attrs.real("weight_decay");
    u.beta1 = static_cast<float>(beta1), u.rest1 = static_cast<float>(1.0 - beta1);
    u.beta2 = static_cast<float>(beta2), u.rest2 = static_cast<float>(1.0 - beta2);
    u.eps = static_cast<float>(call.attrs.real("eps"));

    const bool thin = p.dtype == DType::bf16;
    if (!thin) expect_dtype(p, DType::f32, "a parameter");
    if (thin != (master || seed)) throw std::invalid_argument("adamw: bf16 takes a master or a seed");
    with_float(m.dtype, [&](auto moment) {
        using Moment = decltype(moment);
        if (!thin) return launch<Kept::wide, Moment>(call, u, dense && packed);
        if (master) return launch<Kept::master, Moment>(call, u, dense && packed);
        launch<Kept::stochastic, Moment>(call, u, dense && packed);
    });
}

SUROGATE_CUDA_KERNEL("adamw", adamw);

}  // namespace

}  // namespace surogate::cuda
