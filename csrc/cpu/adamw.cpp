// adamw (surogate/ops/adamw.py).
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

struct Step {
    float beta1, rest1, beta2, rest2, eps, keep, rate, root2, scale;

    // The value after the update; m, v and g are updated where they are.
    __attribute__((always_inline)) float operator()(float p, float& g, float& m, float& v) const {
        const float gradient = g * scale;
        m = beta1 * m + rest1 * gradient;
        v = beta2 * v + rest2 * gradient * gradient;
        g = 0.f;
        return p * keep - rate * m / (std::sqrt(v) / root2 + eps);
    }
};

SUROGATE_SIMD void run_f32(const Step& step, float* p, float* g, float* m, float* v, int64_t n) {
    const Step s = step;  // a copy that no store can reach
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) p[i] = s(p[i], g[i], m[i], v[i]);
}

SUROGATE_SIMD void run_master(const Step& step, bf16* p, float* master, float* g, float* m, float* v, int64_t n) {
    const Step s = step;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float value = s(master[i], g[i], m[i], v[i]);
        master[i] = value;
        p[i] = narrow(value);
    }
}

SUROGATE_SIMD void run_stochastic(const Step& step, bf16* p, const uint32_t* words, float* g, float* m, float* v,
                                  int64_t n) {
    const Step s = step;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) p[i] = narrow_stochastic(s(widen(p[i]), g[i], m[i], v[i]), words[i]);
}

SUROGATE_SIMD void widen_moments(float* m, float* v, const bf16* from_m, const bf16* from_v, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        m[i] = widen(from_m[i]);
        v[i] = widen(from_v[i]);
    }
}

SUROGATE_SIMD void narrow_moments(bf16* m, bf16* v, const uint32_t* words, const float* from_m, const float* from_v,
                                  int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        m[i] = narrow_stochastic(from_m[i], words[i]);
        v[i] = narrow_stochastic(from_v[i], words[i] << 16);
    }
}

float scalar(const Tensor& t) { return *t.as<float>(); }

void adamw(const Call& call) {
    const Tensor &p = call.in[0], &g = call.in[1], &m = call.in[2], &v = call.in[3];
    const Tensor &master = call.in[8], &seed = call.in[9];
    const Tensor moments_seed = call.in.size() > 10 ? call.in[10] : Tensor{};
    const double beta1 = call.attrs.real("beta1"), beta2 = call.attrs.real("beta2"), lr = scalar(call.in[4]);
    const Step step{
        .beta1 = static_cast<float>(beta1),
        .rest1 = static_cast<float>(1.0 - beta1),
        .beta2 = static_cast<float>(beta2),
        .rest2 = static_cast<float>(1.0 - beta2),
        .eps = static_cast<float>(call.attrs.real("eps")),
        .keep = static_cast<float>(1.0 - lr * call.attrs.real("weight_decay")),
        .rate = static_cast<float>(lr / static_cast<double>(scalar(call.in[5]))),
        .root2 = std::sqrt(scalar(call.in[6])),
        .scale = scalar(call.in[7]),
    };
    const bool narrow_storage = p.dtype == DType::bf16;
    if (narrow_storage != (master || seed)) throw std::invalid_argument("adamw: bf16 takes a master or a seed");
    if ((m.dtype == DType::bf16) != static_cast<bool>(moments_seed)) {
        throw std::invalid_argument("adamw: bf16 moments take a seed");
    }
    const int64_t salt = call.attrs.integer("salt");

    const Walk<5> walk({p, g, m, v, master ? master : p});
    // One run of `count` elements with f32 moments at `ms` and `vs`; `at`: where it begins in all tensors.
    const auto run = [&](const auto& offset, int64_t at, int64_t first, int64_t count, float* ms, float* vs) {
        float* gs = g.as<float>() + offset[1] + at;
        if (!narrow_storage) return run_f32(step, p.as<float>() + offset[0] + at, gs, ms, vs, count);
        bf16* ps = p.as<bf16>() + offset[0] + at;
        if (master) return run_master(step, ps, master.as<float>() + offset[4] + at, gs, ms, vs, count);
        Philox random(*seed.as<int64_t>(), salt);
        for (int64_t i = 0; i < count; i += Philox::kMax) {
            const int64_t n = std::min(Philox::kMax, count - i);
            run_stochastic(step, ps + i, random.words(first + at + i, n), gs + i, ms + i, vs + i, n);
        }
    };
    walk.for_each(call.threads, [&](const auto& offset, int64_t first, int64_t count) {
        if (!moments_seed) return run(offset, 0, first, count, m.as<float>() + offset[2], v.as<float>() + offset[3]);
        Philox random(*moments_seed.as<int64_t>(), salt + (int64_t{1} << 32));
        float wide_m[Philox::kMax], wide_v[Philox::kMax];
        for (int64_t at = 0; at < count; at += Philox::kMax) {
            const int64_t n = std::min(Philox::kMax, count - at);
            bf16 *ms = m.as<bf16>() + offset[2] + at, *vs = v.as<bf16>() + offset[3] + at;
            widen_moments(wide_m, wide_v, ms, vs, n);
            run(offset, at, first, n, wide_m, wide_v);
            narrow_moments(ms, vs, random.words(first + at, n), wide_m, wide_v, n);
        }
    });
}

SUROGATE_CPU_KERNEL("adamw", adamw);

}  // namespace
}  // namespace surogate
