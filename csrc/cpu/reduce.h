// Sums in a fixed order that vector units like.
#pragma once

#include <cstdint>

#include "cpu/vec_math.h"

namespace surogate {

// fn(0) + ... + fn(n-1) in T. The terms go round kLanes running sums, which are folded pairwise at the end: the order
// depends on n alone (not on the vector width that the compiler picks), several additions are in flight at a time, and
// the rounding error is that of n/kLanes additions, not n.
template <typename T, typename Fn>
SUROGATE_INLINE T lane_sum(int64_t n, const Fn& fn) {
    constexpr int kLanes = 32;
    T lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<T>(fn(i + lane));
    }
    for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += static_cast<T>(fn(i));
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

}  // namespace surogate
