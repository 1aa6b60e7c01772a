// Work items of unequal length: threads take the next one as they come free.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace surogate {

// fn(item, thread) for item = 0..items-1, thread < threads. An item's result must not depend on its thread, which is
// told for scratch memory alone. fn must not throw: check operands before.
template <typename Fn>
void for_items(int64_t items, int threads, const Fn& fn) {
    if (items <= 1 || threads <= 1) {
        for (int64_t item = 0; item < items; ++item) fn(item, 0);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(std::min<int64_t>(items, threads)))
    for (int64_t item = 0; item < items; ++item) fn(item, omp_get_thread_num());
}

}  // namespace surogate
