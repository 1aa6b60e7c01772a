// dropout (surogate/ops/dropout.py). y may be x.
#include <algorithm>
#include <cmath>

#include "core/kernel.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

SUROGATE_SIMD void drop_run(const float* x, const uint32_t* words, uint32_t lowest, float scale, float* y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float kept = x[i] * scale;
        y[i] = words[i] >= lowest ? kept : 0.f;
    }
}

void dropout(const Call& call) {
    const Tensor &x = call.in[0], &seed = call.in[1], &y = call.out[0];
    const double p = call.attrs.real("p");
    const float scale = static_cast<float>(1.0 / (1.0 - p));
    // word * 2^-32 >= p, in integers; p < 1, but p * 2^32 may round up to 2^32, which no word reaches.
    const uint64_t threshold = static_cast<uint64_t>(std::ceil(std::ldexp(p, 32)));
    const uint32_t lowest = static_cast<uint32_t>(std::min<uint64_t>(threshold, UINT32_MAX));
    const Philox random(*seed.as<int64_t>(), call.attrs.integer("salt"));
    Walk<2>({x, y}).for_each(call.threads, [&](const auto& offset, int64_t first, int64_t count) {
        Philox mine = random;
        for (int64_t done = 0; done < count; done += Philox::kMax) {
            const int64_t n = std::min(Philox::kMax, count - done);
            drop_run(x.as<float>() + offset[0] + done, mine.words(first + done, n), lowest, scale,
                     y.as<float>() + offset[1] + done, n);
        }
    });
}

SUROGATE_CPU_KERNEL("dropout", dropout);

}  // namespace
}  // namespace surogate
