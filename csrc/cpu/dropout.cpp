// dropout (surogate/ops/dropout.py). y may be x.
#include <algorithm>
#include <cmath>

#include "core/kernel.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"

namespace surogate {
namespace {

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
            const uint32_t* word = mine.words(first + done, n);
            const float* from = x.as<float>() + offset[0] + done;
            float* to = y.as<float>() + offset[1] + done;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                const float kept = from[i] * scale;
                to[i] = word[i] >= lowest ? kept : 0.f;
            }
        }
    });
}

SUROGATE_CPU_KERNEL("dropout", dropout);

}  // namespace
}  // namespace surogate
