// dropout (surogate/ops/dropout.py). y may be x.
#include <algorithm>
#include <cmath>

#include "cuda/common.cuh"
#include "cuda/philox.cuh"

namespace surogate::cuda {

namespace {

// A thread the four elements of one Philox block, which may lie in two rows.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    drop(const T* x, Rows x_rows, T* y, Rows y_rows, int64_t total, int64_t width, const int64_t* seed, int64_t salt,
         uint32_t lowest, float scale) {
    const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (block * 4 >= total) return;
    const uint4 words = philox(static_cast<uint64_t>(block), static_cast<uint64_t>(salt), static_cast<uint64_t>(*seed));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int64_t i = block * 4 + e;
        if (i >= total) return;
        const int64_t row = i / width, column = i - row * width;
        const float value = widen(x[x_rows[row] + column]) * scale;
        y[y_rows[row] + column] = narrow<T>(word(words, e) >= lowest ? value : 0.0F);
    }
}

void dropout(const Call& call) {
    const Tensor &x = call.in[0], &seed = call.in[1], &y = call.out[0];
    const double p = call.attrs.real("p");
    // word * 2^-32 >= p, in integers, as csrc/cpu/dropout.cpp has it.
    const auto threshold = static_cast<uint64_t>(std::ceil(std::ldexp(p, 32)));
    const auto lowest = static_cast<uint32_t>(std::min<uint64_t>(threshold, UINT32_MAX));
    const int64_t total = x.numel();
    with_float(x.dtype, [&](auto kind) {
        using T = decltype(kind);
        drop<T><<<blocks_for(divide_up(total, 4)), kThreads, 0, stream_of(call)>>>(
            x.as<T>(), rows_of(x), y.as<T>(), rows_of(y), total, width_of(x), seed.as<int64_t>(),
            call.attrs.integer("salt"), lowest, static_cast<float>(1.0 / (1.0 - p)));
    });
    check_launch("dropout");
}

SUROGATE_CUDA_KERNEL("dropout", dropout);

}  // namespace

}  // namespace surogate::cuda
