// dropout (surogate/ops/dropout.py). y may be x.
#include <algorithm>
#include <cmath>

#include "cuda/common.cuh"
#include "cuda/philox.cuh"

namespace surogate::cuda {

namespace {

struct Drop {
    const void* x;
    void* y;
    Rows x_rows, y_rows;
    Walk walk;
    const int64_t* seed;
    int64_t salt;
    uint32_t lowest;
    float scale;
};

// A thread a pack, which has Philox blocks of its own if it has at least 4 elements. Single elements share one: the
// price of odd shapes.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) drop(Drop d) {
    const int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (pack >= d.walk.packs) return;
    const Place place(d.walk, pack, kSize);
    auto values = Pack<T, kSize>::at(static_cast<const T*>(d.x) + place.in(d.x_rows));
    const auto salt = static_cast<uint64_t>(d.salt), seed = static_cast<uint64_t>(*d.seed);
    const auto first = static_cast<uint64_t>(pack) * kSize;
    constexpr int kWords = 4;  // of a Philox block
#pragma unroll
    for (int e = 0; e < kSize; e += kWords) {
        const uint4 words = philox((first + e) / kWords, salt, seed);
#pragma unroll
        for (int i = 0; i < kWords && i < kSize; ++i) {
            const uint32_t mine = word(words, kSize == 1 ? static_cast<int>(first % kWords) : i);
            values.set(e + i, mine >= d.lowest ? values[e + i] * d.scale : 0.0F);
        }
    }
    values.put(static_cast<T*>(d.y) + place.in(d.y_rows));
}

void dropout(const Call& call) {
    const Tensor &x = call.in[0], &seed = call.in[1], &y = call.out[0];
    expect_dtype(y, x.dtype, "y");
    const double p = call.attrs.real("p");
    // word * 2^-32 >= p, in integers; p < 1, but p * 2^32 may round up to 2^32, which no word reaches.
    const auto threshold = static_cast<uint64_t>(std::ceil(std::ldexp(p, 32)));
    const Walk walk(x, y);
    if (walk.packs == 0) return;
    const Drop d{.x = x.data,
                 .y = y.data,
                 .x_rows = walk.rows(x),
                 .y_rows = walk.rows(y),
                 .walk = walk,
                 .seed = seed.as<int64_t>(),
                 .salt = call.attrs.integer("salt"),
                 .lowest = static_cast<uint32_t>(std::min<uint64_t>(threshold, UINT32_MAX)),
                 .scale = static_cast<float>(1.0 / (1.0 - p))};
    const unsigned blocks = blocks_for(walk.packs);
    with_float(x.dtype, [&](auto kind) {
        using T = decltype(kind);
        if (walk.size == kPack) {
            drop<T, kPack><<<blocks, kThreads, 0, stream_of(call)>>>(d);
        } else {
            drop<T, 1><<<blocks, kThreads, 0, stream_of(call)>>>(d);
        }
    });
    check_launch("dropout");
}

SUROGATE_CUDA_KERNEL("dropout", dropout);

}  // namespace

}  // namespace surogate::cuda
