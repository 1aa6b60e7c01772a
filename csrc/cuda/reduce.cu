// sum_rows, sum_squares and clip_scale: sums over fixed parts, then over the parts in their order.
#include <algorithm>

#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

constexpr int kWarp = 32;

// A block 32 columns: a warp every 32nd tile, then the warps in order.
__global__ void __launch_bounds__(1024)
    partial_sum(const float* partial, int tiles, int width, const float* acc, float* out) {
    __shared__ float sums[kWarp][kWarp + 1];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
    float sum = 0.0F;
    if (column < width) {
#pragma unroll 8
        for (int tile = warp; tile < tiles; tile += kWarp) sum += partial[static_cast<int64_t>(tile) * width + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= width) return;
    sum = 0.0F;
#pragma unroll
    for (int w = 0; w < kWarp; ++w) sum += sums[w][lane];
    out[column] = acc != nullptr ? acc[column] + sum : sum;
}

}  // namespace

void sum_partials(const float* partial, int tiles, int width, const Tensor& acc, const Tensor& out,
                  cudaStream_t stream) {
    expect_dtype(acc, DType::f32, "a sum's accumulator");
    expect_dtype(out, DType::f32, "a sum over rows");
    partial_sum<<<blocks_for(width, kWarp), 1024, 0, stream>>>(partial, tiles, width, acc.as<float>(), out.as<float>());
    check_launch("adding up partial sums");
}

namespace {

constexpr int kTiles = 64;  // of rows, at most; surogate/ops/sum_rows.py plans their room
constexpr int kTileWarps = 8;

// A block 32 packs of columns of a tile of rows; a warp every 8th row, then the warps in order.
template <typename T, int kSize>
__global__ void __launch_bounds__(kWarp* kTileWarps)
    column_partial(const T* x, Rows x_rows, uint32_t rows, uint32_t tile_rows, int width, float* partial) {
    __shared__ float sums[kTileWarps][kWarp * kSize];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kWarp * kSize), column = first + lane * kSize;
    const uint32_t begin = blockIdx.y * tile_rows, end = min(rows, begin + tile_rows);
    float sum[kSize] = {};
    if (column < width) {
#pragma unroll 4
        for (uint32_t row = begin + warp; row < end; row += kTileWarps) {
            const auto pack = Pack<T, kSize>::at(x + x_rows[row] + column);
#pragma unroll
            for (int e = 0; e < kSize; ++e) sum[e] += pack[e];
        }
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) sums[warp][lane * kSize + e] = sum[e];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kWarp * kSize && first + i < width; i += kWarp * kTileWarps) {
        float all = 0.0F;
#pragma unroll
        for (int w = 0; w < kTileWarps; ++w) all += sums[w][i];
        partial[static_cast<int64_t>(blockIdx.y) * width + first + i] = all;
    }
}

void sum_rows(const Call& call) {
    const Tensor &dy = call.in[0], &acc = call.in[1], &out = call.out[0];
    const int width = width_in(dy);
    if (width == 0) return;
    const uint32_t rows = rows_in(dy);
    auto* partial = workspace_of<float>(call, int64_t{kTiles} * width);
    const auto tile_rows = static_cast<uint32_t>(std::max<int64_t>(1, divide_up(rows, kTiles)));
    const auto tiles = static_cast<unsigned>(divide_up(rows, tile_rows));
    if (rows > 0) {
        with_float(dy.dtype, [&](auto kind) {
            using T = decltype(kind);
            auto run = [&](auto size) {
                constexpr int kSize = decltype(size)::value;
                const dim3 grid(blocks_for(width, kWarp * kSize), tiles);
                column_partial<T, kSize><<<grid, kWarp * kTileWarps, 0, stream_of(call)>>>(dy.as<T>(), Rows(dy), rows,
                                                                                           tile_rows, width, partial);
            };
            if (packs(dy)) return run(std::integral_constant<int, kPack>{});
            run(std::integral_constant<int, 1>{});
        });
        check_launch("sum_rows");
    }
    sum_partials(partial, static_cast<int>(tiles), width, acc, out, stream_of(call));
}

// Partial sums of squares: about as many blocks as a large GPU holds at a time. surogate/ops/sum_squares.py plans their
// room.
constexpr int kBlocks = 1024;
constexpr int kFloats = 4;  // of a pack: their squares are added in f32, everything beyond in f64
constexpr int kUnroll = 4;

// Packs in turn over all threads; `dense` tensors are one row.
template <int kSize>
__global__ void __launch_bounds__(kThreads)
    squares_partial(const float* x, int64_t packs, bool dense, Rows rows, Divider row_packs, double* partial) {
    constexpr int64_t kStep = int64_t{kBlocks} * kThreads;
    double sum = 0.0;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += kUnroll * kStep) {
        Pack<float, kSize> pack[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int64_t at = i + u * kStep;
            if (at < packs) {
                int64_t offset = at * kSize;
                if (!dense) {
                    const uint32_t row = row_packs.quotient(static_cast<uint32_t>(at));
                    offset = rows[row] + (at - int64_t{row} * row_packs.divisor()) * kSize;
                }
                pack[u] = Pack<float, kSize>::at(x + offset);
            } else {
#pragma unroll
                for (int e = 0; e < kSize; ++e) pack[u].items[e] = 0.0F;
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            float part = 0.0F;
#pragma unroll
            for (int e = 0; e < kSize; ++e) part += pack[u][e] * pack[u][e];
            sum += static_cast<double>(part);
        }
    }
    sum = group_sum<kThreads>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) squares_sum(const double* partial, const double* acc, double* out) {
    double sum = 0.0;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kBlocks; i += kThreads) sum += partial[i];
    sum = group_sum<kThreads>(sum);
    if (threadIdx.x == 0) *out = acc != nullptr ? *acc + sum : sum;
}

void sum_squares(const Call& call) {
    const Tensor &x = call.in[0], &acc = call.in[1], &out = call.out[0];
    expect_dtype(x, DType::f32, "x");
    expect_dtype(out, DType::f64, "a sum of squares");
    auto* partial = workspace_of<double>(call, kBlocks);
    const bool dense = x.contiguous();
    auto run = [&](auto size) {
        constexpr int kSize = decltype(size)::value;
        const int64_t count = x.numel() / kSize;
        if (!dense && count > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
        const Divider row_packs(dense || count == 0 ? 1 : width_of(x) / kSize);
        squares_partial<kSize><<<kBlocks, kThreads, 0, stream_of(call)>>>(x.as<float>(), count, dense,
                                                                          dense ? Rows() : Rows(x), row_packs, partial);
    };
    const bool whole = dense ? x.numel() % kFloats == 0 && aligned(x.data, kFloats, x.dtype) : packs(x, kFloats);
    if (whole) {
        run(std::integral_constant<int, kFloats>{});
    } else {
        run(std::integral_constant<int, 1>{});
    }
    squares_sum<<<1, kThreads, 0, stream_of(call)>>>(partial, acc.as<double>(), out.as<double>());
    check_launch("sum_squares");
}

__global__ void clip(const double* sum, float* norm, float* scale, double max_norm) {
    const double n = sqrt(*sum), ratio = max_norm / (n + 1e-6);
    *norm = static_cast<float>(n);
    // Written so that a ratio that is not a number stays one.
    *scale = max_norm == 0.0 || ratio > 1.0 ? 1.0F : static_cast<float>(ratio);
}

void clip_scale(const Call& call) {
    clip<<<1, 1, 0, stream_of(call)>>>(call.in[0].as<double>(), call.out[0].as<float>(), call.out[1].as<float>(),
                                       call.attrs.real("max_norm"));
    check_launch("clip_scale");
}

SUROGATE_CUDA_KERNEL("sum_rows", sum_rows);
SUROGATE_CUDA_KERNEL("sum_squares", sum_squares);
SUROGATE_CUDA_KERNEL("clip_scale", clip_scale);

}  // namespace

}  // namespace surogate::cuda
