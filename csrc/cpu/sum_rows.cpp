// sum_rows (surogate/ops/sum_rows.py).
#include <algorithm>

#include "core/kernel.h"
#include "cpu/parallel.h"

namespace surogate {
namespace {

constexpr int64_t kColumns = 64;
constexpr int64_t kBlock = 64;  // rows that are added in f32; the blocks' sums are added in f64

void sum_rows(const Call& call) {
    const Tensor &dy = call.in[0], &acc = call.in[1], &out = call.out[0];
    const int64_t rows = dy.rows();
    const RowOffsets at_dy(dy);
    for_ranges(dy.dim(-1), kColumns, call.threads, [&](int64_t begin, int64_t end) {
        const int64_t columns = end - begin;
        double total[kColumns] = {};
        for (int64_t first = 0; first < rows; first += kBlock) {
            float block[kColumns] = {};
            for (int64_t r = first; r < std::min(rows, first + kBlock); ++r) {
                const float* row = dy.as<float>() + at_dy[r] + begin;
                for (int64_t i = 0; i < columns; ++i) block[i] += row[i];
            }
            for (int64_t i = 0; i < columns; ++i) total[i] += block[i];
        }
        for (int64_t i = 0; i < columns; ++i) {
            out.as<float>()[begin + i] = static_cast<float>(total[i] + (acc ? acc.as<float>()[begin + i] : 0.f));
        }
    });
}

SUROGATE_CPU_KERNEL("sum_rows", sum_rows);

}  // namespace
}  // namespace surogate
