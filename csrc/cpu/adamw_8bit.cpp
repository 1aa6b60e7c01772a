// adamw_8bit (surogate/ops/adamw_8bit.py): moments in blocks of 256 elements of eight bits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "core/blockwise8.h"
#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

using blockwise8::kBlock;

struct Step {
    float beta1, rest1, beta2, rest2, eps, keep, rate, root2, scale;
};

SUROGATE_SIMD void decode(float* x, const uint8_t* index, const float* table, float absmax) {
    for (int64_t i = 0; i < kBlock; ++i) x[i] = table[index[i]] * absmax;
}

// New moments where the old ones are, and by how much the weight moves: rounded as surogate/ops/adamw_8bit.py says.
SUROGATE_SIMD void update(const Step& step, const float* g, float* m, float* v, float* move) {
    const Step s = step;
#pragma omp simd
    for (int64_t i = 0; i < kBlock; ++i) {
        const float gradient = g[i] * s.scale;
        m[i] = __builtin_fmaf(s.rest1, gradient, s.beta1 * m[i]);
        v[i] = __builtin_fmaf(s.rest2 * gradient, gradient, s.beta2 * v[i]);
        move[i] = s.rate * m[i] / (std::sqrt(v[i]) / s.root2 + s.eps);
    }
}

SUROGATE_SIMD float largest(const float* x) {
    float most = 0.f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < kBlock; ++i) most = std::max(most, std::fabs(x[i]));
    return most;
}

void encode(uint8_t* index, float& absmax, const float* x, const float* table, const uint8_t* start) {
    absmax = largest(x);
    const float inverse = blockwise8::inverse(absmax);
    for (int64_t i = 0; i < kBlock; ++i) index[i] = blockwise8::nearest(x[i] * inverse, table, start);
}

float scalar(const Tensor& t) { return *t.as<float>(); }

void adamw_8bit(const Call& call) {
    for (size_t i : {0, 1, 2, 3, 4, 5, 6, 7, 12}) {
        if (call.in[i] && !call.in[i].contiguous()) throw std::invalid_argument("adamw_8bit needs dense tensors");
    }
    const Tensor &p = call.in[0], &master = call.in[12], &seed = call.in[13];
    const double beta1 = call.attrs.real("beta1"), beta2 = call.attrs.real("beta2"), lr = scalar(call.in[8]);
    const Step step{
        .beta1 = static_cast<float>(beta1),
        .rest1 = static_cast<float>(1.0 - beta1),
        .beta2 = static_cast<float>(beta2),
        .rest2 = static_cast<float>(1.0 - beta2),
        .eps = static_cast<float>(call.attrs.real("eps")),
        .keep = static_cast<float>(1.0 - lr * call.attrs.real("weight_decay")),
        .rate = static_cast<float>(lr / static_cast<double>(scalar(call.in[9]))),
        .root2 = std::sqrt(scalar(call.in[10])),
        .scale = scalar(call.in[11]),
    };
    const bool narrow_storage = p.dtype == DType::bf16;
    if (narrow_storage != (master || seed)) throw std::invalid_argument("adamw_8bit: bf16 takes a master or a seed");

    const float *table_m = call.in[6].as<float>(), *table_v = call.in[7].as<float>();
    uint8_t start_m[blockwise8::kStarts], start_v[blockwise8::kStarts];
    for (int i = 0; i < blockwise8::kStarts; ++i) {
        start_m[i] = blockwise8::start_of(i, table_m);
        start_v[i] = blockwise8::start_of(i, table_v);
    }
    for_ranges(p.numel() / kBlock, kTileElements / kBlock, call.threads, [&](int64_t begin, int64_t end) {
        float m[kBlock], v[kBlock], move[kBlock];
        Philox random(seed ? *seed.as<int64_t>() : 0, call.attrs.integer("salt"));
        static_assert(Philox::kMax == kBlock);
        for (int64_t block = begin; block < end; ++block) {
            const int64_t first = block * kBlock;
            float* g = call.in[1].as<float>() + first;
            uint8_t *index_m = call.in[2].as<uint8_t>() + first, *index_v = call.in[3].as<uint8_t>() + first;
            float &absmax_m = call.in[4].as<float>()[block], &absmax_v = call.in[5].as<float>()[block];
            decode(m, index_m, table_m, absmax_m);
            decode(v, index_v, table_v, absmax_v);
            update(step, g, m, v, move);
            encode(index_m, absmax_m, m, table_m, start_m);
            encode(index_v, absmax_v, v, table_v, start_v);
            std::fill_n(g, kBlock, 0.f);
            if (!narrow_storage) {
                float* ps = p.as<float>() + first;
                for (int64_t i = 0; i < kBlock; ++i) ps[i] = ps[i] * step.keep - move[i];
                continue;
            }
            bf16* ps = p.as<bf16>() + first;
            if (master) {
                float* precise = master.as<float>() + first;
                for (int64_t i = 0; i < kBlock; ++i) ps[i] = narrow(precise[i] = precise[i] * step.keep - move[i]);
                continue;
            }
            const uint32_t* words = random.words(first, kBlock);
            for (int64_t i = 0; i < kBlock; ++i) {
                ps[i] = narrow_stochastic(widen(ps[i]) * step.keep - move[i], words[i]);
            }
        }
    });
}

SUROGATE_CPU_KERNEL("adamw_8bit", adamw_8bit);

}  // namespace
}  // namespace surogate
