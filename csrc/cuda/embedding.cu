// embedding and its gradient (surogate/ops/embedding.py). A kernel cannot raise: an id outside the table gives a row of
// NaN, which stops the step, and no gradient.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

constexpr int kUnroll = 2;

template <typename W, typename T, int kSize>
__global__ void __launch_bounds__(kThreads)
    gather(const W* table, int64_t table_row, int64_t vocabulary, const int32_t* ids, T* y, int64_t y_row,
           uint32_t packs, Divider row_packs) {
    const uint32_t first = blockIdx.x * (kThreads * kUnroll) + threadIdx.x;
    Pack<W, kSize> from[kUnroll];
    uint32_t token[kUnroll], column[kUnroll];
    bool inside[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        const uint32_t pack = first + u * kThreads;
        if (pack >= packs) break;
        token[u] = row_packs.quotient(pack);
        column[u] = (pack - token[u] * row_packs.divisor()) * kSize;
        const int64_t id = ids[token[u]];
        inside[u] = id >= 0 && id < vocabulary;
        if (inside[u]) from[u] = Pack<W, kSize>::at(table + id * table_row + column[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads >= packs) return;
        Pack<T, kSize> to;
#pragma unroll
        for (int e = 0; e < kSize; ++e) to.set(e, inside[u] ? from[u][e] : NAN);
        to.put(y + token[u] * y_row + column[u]);
    }
}

void embedding(const Call& call) {
    const Tensor &table = call.in[0], &ids = call.in[1], &y = call.out[0];
    const bool packed = packs(table) && packs(y);
    const int64_t count = y.numel() / (packed ? kPack : 1);
    if (count == 0) return;
    if (count > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
    const Divider row_packs(width_of(y) / (packed ? kPack : 1));
    with_float(table.dtype, [&](auto weight) {
        with_float(y.dtype, [&](auto kind) {
            using W = decltype(weight);
            using T = decltype(kind);
            auto run = [&](auto size) {
                gather<W, T, decltype(size)::value>
                    <<<blocks_for(count, kThreads * kUnroll), kThreads, 0, stream_of(call)>>>(
                        table.as<W>(), table.stride[0], table.shape[0], ids.as<int32_t>(), y.as<T>(), y.stride[0],
                        static_cast<uint32_t>(count), row_packs);
            };
            if (packed) return run(std::integral_constant<int, kPack>{});
            run(std::integral_constant<int, 1>{});
        });
    });
    check_launch("embedding");
}

// Of every id the place where it occurs first, and how often it occurs after that. Both begin at 2^32 - 1. Integer
// atomics: the result does not depend on their order.
__global__ void __launch_bounds__(kThreads)
    find_first(const int32_t* ids, int tokens, int64_t rows, uint32_t* first, uint32_t* more) {
    const int t = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (t >= tokens || ids[t] < 0 || ids[t] >= rows) return;
    atomicMin(first + ids[t], static_cast<uint32_t>(t));
    atomicAdd(more + ids[t], 1U);
}

constexpr int kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kLooks = 4;                 // ids that a thread looks at together
constexpr int kStep = kThreads * kLooks;  // ids that a block looks at together
constexpr int kList = 2 * kStep;          // places that it remembers
constexpr int kMany = 2 * kWarps;         // from so many on, warps share out places instead of columns

struct Scatter {
    const void* dy;
    const int32_t* ids;
    float* out;
    int64_t dy_row, out_row, rows;
    const uint32_t *first, *more;
    int tokens, width;
};

// out[id] += the sum of dy over the places in the list; all threads of the block call.
template <typename T, int kSize>
__device__ void add_places(const Scatter& s, int64_t id, const int* places, int count) {
    const T* dy = static_cast<const T*>(s.dy);
    float* out = s.out + id * s.out_row;
    if (count < kMany) {
        for (int c = static_cast<int>(threadIdx.x) * kSize; c < s.width; c += kThreads * kSize) {
            auto sum = Pack<float, kSize>::at(out + c);
#pragma unroll 4
            for (int i = 0; i < count; ++i) {
                const auto pack = Pack<T, kSize>::at(dy + places[i] * s.dy_row + c);
#pragma unroll
                for (int e = 0; e < kSize; ++e) sum.items[e] += pack[e];
            }
            sum.put(out + c);
        }
        return;
    }
    // A warp every eighth place, over 32 packs of columns at a time; then the warps in order.
    __shared__ float sums[kWarps][kWarp * kSize];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    for (int begin = 0; begin < s.width; begin += kWarp * kSize) {
        const int c = begin + lane * kSize;
        float sum[kSize] = {};
        if (c < s.width) {
#pragma unroll 8
            for (int i = warp; i < count; i += kWarps) {
                const auto pack = Pack<T, kSize>::at(dy + places[i] * s.dy_row + c);
#pragma unroll
                for (int e = 0; e < kSize; ++e) sum[e] += pack[e];
            }
        }
        __syncthreads();  // the sums before these have been read
#pragma unroll
        for (int e = 0; e < kSize; ++e) sums[warp][lane * kSize + e] = sum[e];
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < kWarp * kSize && begin + i < s.width; i += kThreads) {
            float all = out[begin + i];
#pragma unroll
            for (int w = 0; w < kWarps; ++w) all += sums[w][i];
            out[begin + i] = all;
        }
    }
}

// A block a token. The block of an id's first place owns that row of the table's gradient, finds the other places in
// their order and adds up; the others leave at once.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) scatter(Scatter s) {
    const int self = static_cast<int>(blockIdx.x);
    const int64_t id = s.ids[self];
    if (id < 0 || id >= s.rows || s.first[id] != static_cast<uint32_t>(self)) return;
    uint32_t left = s.more[id];
    __shared__ int places[kList];
    __shared__ int counts[kWarps];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    if (threadIdx.x == 0) places[0] = self;
    int count = 1;
    for (int base = self + 1; left > 0 && base < s.tokens; base += kStep) {
        unsigned found[kLooks];  // a bit a lane
        int of_warp = 0;
#pragma unroll
        for (int k = 0; k < kLooks; ++k) {
            const int t = base + (warp * kLooks + k) * kWarp + lane;
            found[k] = __ballot_sync(0xffffffffU, t < s.tokens && s.ids[t] == id);
            of_warp += __popc(found[k]);
        }
        __syncthreads();  // the counts before these have been read
        if (lane == 0) counts[warp] = of_warp;
        __syncthreads();
        int at = count, all = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) at += counts[w];
            all += counts[w];
        }
#pragma unroll
        for (int k = 0; k < kLooks; ++k) {
            if (found[k] >> lane & 1U) {
                places[at + __popc(found[k] & ((1U << lane) - 1U))] = base + (warp * kLooks + k) * kWarp + lane;
            }
            at += __popc(found[k]);
        }
        count += all;
        left -= static_cast<uint32_t>(all);
        if (count > kList - kStep) {
            __syncthreads();
            add_places<T, kSize>(s, id, places, count);
            __syncthreads();
            count = 0;
        }
    }
    __syncthreads();
    if (count > 0) add_places<T, kSize>(s, id, places, count);
}

void embedding_backward(const Call& call) {
    const Tensor &dy = call.in[0], &ids = call.in[1], &acc = call.in[2], &out = call.out[0];
    expect_dtype(out, DType::f32, "the gradient of a table");
    const int64_t rows = out.shape[0], tokens = ids.numel();
    if (!acc) {
        check(cudaMemset2DAsync(out.data, static_cast<size_t>(out.stride[0]) * sizeof(float), 0,
                                static_cast<size_t>(width_of(out)) * sizeof(float), static_cast<size_t>(rows),
                                stream_of(call)),
              "embedding_backward");
    }
    if (tokens == 0 || width_of(dy) == 0) return;
    if (tokens > INT32_MAX - kStep) throw std::invalid_argument("too many tokens for one launch");
    auto* first = workspace_of<uint32_t>(call, 2 * rows);
    check(cudaMemsetAsync(first, 0xFF, static_cast<size_t>(2 * rows) * sizeof(uint32_t), stream_of(call)),
          "embedding_backward");
    const Scatter s{.dy = dy.data,
                    .ids = ids.as<int32_t>(),
                    .out = out.as<float>(),
                    .dy_row = dy.stride[0],
                    .out_row = out.stride[0],
                    .rows = rows,
                    .first = first,
                    .more = first + rows,
                    .tokens = static_cast<int>(tokens),
                    .width = width_in(dy)};
    find_first<<<blocks_for(tokens), kThreads, 0, stream_of(call)>>>(s.ids, s.tokens, rows, first, first + rows);
    const auto blocks = static_cast<unsigned>(tokens);
    with_float(dy.dtype, [&](auto kind) {
        using T = decltype(kind);
        if (packs(dy) && packs(out)) {
            scatter<T, kPack><<<blocks, kThreads, 0, stream_of(call)>>>(s);
        } else {
            scatter<T, 1><<<blocks, kThreads, 0, stream_of(call)>>>(s);
        }
    });
    check_launch("embedding_backward");
}

SUROGATE_CUDA_KERNEL("embedding", embedding);
SUROGATE_CUDA_KERNEL("embedding_backward", embedding_backward);

}  // namespace

}  // namespace surogate::cuda
