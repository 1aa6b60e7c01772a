// quantize_fp8 and fp8_update_scales (surogate/ops/quantize_fp8.py): a tensor is read once where its scale is known
// from earlier steps. Otherwise a pass before that finds its largest magnitude; it ends at once where it is not needed,
// so that the host need not know. Largest values are found by atomics on integers, whose order does not matter.
#include <algorithm>

#include "core/formats.h"
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

using namespace formats;

struct Quantize {
    const void* x;
    uint8_t* q;
    float *state, *scale;
    const float* given;
    uint32_t* found;  // largest magnitude where no scale is known
    Rows x_rows, q_rows;
    Walk walk;
};

__device__ inline float known_scale(const Quantize& o) {
    return o.state != nullptr ? o.state[kScale] : o.given != nullptr ? *o.given : 0.0F;
}

// One atomic a block.
__device__ inline void note(uint32_t most, uint32_t* at) {
    __shared__ uint32_t parts[kThreads / 32];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) most = max(most, __shfl_xor_sync(0xffffffffU, most, lane));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) most = max(most, parts[w]);
    if (most > 0) atomicMax(at, most);
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) find_largest(Quantize o) {
    if (known_scale(o) != 0.0F) return;
    uint32_t most = 0;
    for (int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; pack < o.walk.packs;
         pack += static_cast<int64_t>(gridDim.x) * kThreads) {
        const Place place(o.walk, pack, kSize);
        const auto x = Pack<T, kSize>::at(static_cast<const T*>(o.x) + place.in(o.x_rows));
#pragma unroll
        for (int e = 0; e < kSize; ++e) most = max(most, bits_of(x[e]) & kMagnitude);
    }
    note(most, o.found);
}

template <typename F, typename T, int kSize>
__global__ void __launch_bounds__(kThreads) encode(Quantize o) {
    float scale = known_scale(o);
    if (scale == 0.0F) scale = scale_for<F>(*o.found);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        o.scale[0] = scale;
        o.scale[1] = 1.0F / scale;
    }
    uint32_t most = 0;
    for (int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; pack < o.walk.packs;
         pack += static_cast<int64_t>(gridDim.x) * kThreads) {
        const Place place(o.walk, pack, kSize);
        const auto x = Pack<T, kSize>::at(static_cast<const T*>(o.x) + place.in(o.x_rows));
        Pack<uint8_t, kSize> q;
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
            most = max(most, bits_of(x[e]) & kMagnitude);
            q.items[e] = F::nearest(x[e] * scale);
        }
        q.put(o.q + place.in(o.q_rows));
    }
    if (o.state != nullptr) note(most, reinterpret_cast<uint32_t*>(o.state + kAmax));
}

template <typename F, typename T, int kSize>
void launch(const Quantize& o, cudaStream_t stream) {
    // Few enough blocks that each has several packs a thread, enough for the largest device.
    const unsigned blocks = std::min(blocks_for(std::max<int64_t>(o.walk.packs, 1)), 1056U);
    if (o.given == nullptr) {
        check(cudaMemsetAsync(o.found, 0, sizeof *o.found, stream), "clearing");
        find_largest<T, kSize><<<blocks, kThreads, 0, stream>>>(o);
    }
    encode<F, T, kSize><<<blocks, kThreads, 0, stream>>>(o);
    check_launch("quantize_fp8");
}

void quantize_fp8(const Call& call) {
    const Tensor &x = call.in[0], &q = call.out[0];
    const Walk walk(x, q);
    expect_dtype(q, DType::u8, "a quantised tensor");
    const Quantize o{x.data,
                     q.as<uint8_t>(),
                     call.in[1].as<float>(),
                     call.out[1].as<float>(),
                     call.in[2].as<float>(),
                     workspace_of<uint32_t>(call, 1),
                     walk.rows(x),
                     walk.rows(q),
                     walk};
    const bool e5m2 = call.attrs.flag("e5m2"), wide = walk.size == kPack;
    with_float(x.dtype, [&](auto kind) {
        using T = decltype(kind);
        const auto run = [&](auto format) {
            using F = decltype(format);
            if (wide) {
                launch<F, T, kPack>(o, stream_of(call));
            } else {
                launch<F, T, 1>(o, stream_of(call));
            }
        };
        if (e5m2) {
            run(E5M2{});
        } else {
            run(E4M3{});
        }
    });
}

// A warp a row.
template <typename F>
__global__ void __launch_bounds__(kThreads) update(float* states, int64_t rows, int width, int history) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (index >= rows) return;
    float* row = states + index * width;
    const uint32_t amax = bits_of(row[kAmax]);
    const int at = static_cast<int>(row[kPosition]);
    const bool finite = amax < kInfinity;
    uint32_t most = 0;
    for (int i = lane; i < history; i += 32) {
        most = max(most, finite && i == at ? amax : bits_of(row[kHistory + i]));
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) most = max(most, __shfl_xor_sync(0xffffffffU, most, other));
    if (lane != 0) return;
    row[kAmax] = 0.0F;
    if (finite) {
        row[kHistory + at] = float_of(amax);
        row[kPosition] = static_cast<float>((at + 1) % history);
    }
    row[kScale] = most == 0 ? 0.0F : scale_for<F>(most);
}

void fp8_update_scales(const Call& call) {
    const auto width = static_cast<int>(call.attrs.integer("width"));
    const auto history = static_cast<int>(call.attrs.integer("history"));
    const int64_t rows = call.out[0].numel() / width;
    if (rows == 0) return;
    auto* states = call.out[0].as<float>();
    const unsigned blocks = blocks_for(rows, kThreads / 32);
    if (call.attrs.flag("e5m2")) {
        update<E5M2><<<blocks, kThreads, 0, stream_of(call)>>>(states, rows, width, history);
    } else {
        update<E4M3><<<blocks, kThreads, 0, stream_of(call)>>>(states, rows, width, history);
    }
    check_launch("fp8_update_scales");
}

SUROGATE_CUDA_KERNEL("quantize_fp8", quantize_fp8);
SUROGATE_CUDA_KERNEL("fp8_update_scales", fp8_update_scales);

}  // namespace

}  // namespace surogate::cuda
