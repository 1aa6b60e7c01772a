// rope_table and rope (surogate/ops/rope.py): the first half of a head turns against its second half.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

__global__ void __launch_bounds__(kThreads) table(const int32_t* positions, const float* frequencies, float* cos_out,
                                                  float* sin_out, int64_t total, int half, double scale) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= total) return;
    // In double: at position 100,000 a float angle is off by more than 0.003.
    double s, c;
    sincos(static_cast<double>(positions[i / half]) * static_cast<double>(frequencies[i % half]), &s, &c);
    cos_out[i] = static_cast<float>(c * scale);
    sin_out[i] = static_cast<float>(s * scale);
}

void rope_table(const Call& call) {
    const Tensor &positions = call.in[0], &frequencies = call.in[1], &cosines = call.out[0], &sines = call.out[1];
    if (!cosines.contiguous() || !sines.contiguous()) throw std::invalid_argument("rope_table needs dense results");
    table<<<blocks_for(cosines.numel()), kThreads, 0, stream_of(call)>>>(
        positions.as<int32_t>(), frequencies.as<float>(), cosines.as<float>(), sines.as<float>(), cosines.numel(),
        static_cast<int>(width_of(cosines)), call.attrs.real("scale", 1.0));
    check_launch("rope_table");
}

// A thread a pack of pairs; y may be x.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) rotate(const T* x, Rows x_rows, const float* cosines, const float* sines,
                                                   T* y, Rows y_rows, int64_t rows, int heads, int half, float sign) {
    const int packs = half / kSize;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= rows * packs) return;
    const int64_t row = i / packs;
    const int c = static_cast<int>(i - row * packs) * kSize;
    const int64_t angle = row / heads * half + c;
    float first[kSize], second[kSize], cosine[kSize], sine[kSize];
    load<kSize>(x + x_rows[row] + c, first);
    load<kSize>(x + x_rows[row] + half + c, second);
    load<kSize>(cosines + angle, cosine);
    load<kSize>(sines + angle, sine);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
        const float a = first[e], b = second[e], s = sign * sine[e];
        first[e] = a * cosine[e] - b * s;
        second[e] = b * cosine[e] + a * s;
    }
    store<kSize>(y + y_rows[row] + c, first);
    store<kSize>(y + y_rows[row] + half + c, second);
}

void rope(const Call& call) {
    const Tensor &x = call.in[0], &cosines = call.in[1], &sines = call.in[2], &y = call.out[0];
    const int half = static_cast<int>(width_of(x) / 2), heads = static_cast<int>(x.shape[1]);
    const int64_t rows = x.rows();
    if (!cosines.contiguous() || !sines.contiguous()) throw std::invalid_argument("cos and sin must be dense");
    const float sign = call.attrs.flag("inverse") ? -1.0F : 1.0F;
    const bool packed = half % 8 == 0 && packs(x, 8) && packs(y, 8) && packs(cosines, 4) && packs(sines, 4);
    with_float(x.dtype, [&](auto kind) {
        using T = decltype(kind);
        auto launch = [&](auto size) {
            constexpr int kSize = decltype(size)::value;
            rotate<T, kSize><<<blocks_for(rows * (half / kSize)), kThreads, 0, stream_of(call)>>>(
                x.as<T>(), rows_of(x), cosines.as<float>(), sines.as<float>(), y.as<T>(), rows_of(y), rows, heads, half,
                sign);
        };
        if (packed) {
            launch(std::integral_constant<int, 8>{});
        } else {
            launch(std::integral_constant<int, 1>{});
        }
    });
    check_launch("rope");
}

SUROGATE_CUDA_KERNEL("rope_table", rope_table);
SUROGATE_CUDA_KERNEL("rope", rope);

}  // namespace

}  // namespace surogate::cuda
