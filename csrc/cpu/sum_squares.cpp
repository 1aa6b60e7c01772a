// sum_squares (surogate/ops/sum_squares.py).
#include "core/kernel.h"
#include "cpu/parallel.h"
#include "cpu/reduce.h"
#include "cpu/vec_math.h"

namespace surogate {
namespace {

SUROGATE_SIMD double run_squares(const float* x, int64_t n) {
    return lane_sum<double>(n, [x](int64_t i) { return static_cast<double>(x[i]) * x[i]; });
}

void sum_squares(const Call& call) {
    const Tensor &x = call.in[0], &acc = call.in[1], &out = call.out[0];
    const Walk<1> walk({x});
    double* partial = call.workspace.as<double>();
    for_tiles(walk.tiles(), call.threads, [&](int64_t tile) {
        double sum = 0.0;
        walk.visit(tile, [&](const auto& offset, int64_t, int64_t count) {
            sum += run_squares(x.as<float>() + offset[0], count);
        });
        partial[tile] = sum;
    });
    double total = acc ? *acc.as<double>() : 0.0;
    for (int64_t tile = 0; tile < walk.tiles(); ++tile) total += partial[tile];
    *out.as<double>() = total;
}

SUROGATE_CPU_KERNEL("sum_squares", sum_squares);

}  // namespace
}  // namespace surogate
