// sum_rows, sum_squares and clip_scale: sums over fixed parts, then over the parts in a fixed order.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

constexpr int kTiles = 64;     // of rows; surogate/ops/sum_rows.py plans their room
constexpr int kBlocks = 1024;  // partial sums of squares; surogate/ops/sum_squares.py likewise

template <typename T>
__global__ void __launch_bounds__(kThreads)
    column_partial(const T* x, Rows x_rows, int64_t rows, int width, float* partial) {
    const int column = static_cast<int>(blockIdx.x * 32 + threadIdx.x % 32), lane = static_cast<int>(threadIdx.x / 32);
    const int64_t tile = (rows + kTiles - 1) / kTiles;
    const int64_t begin = blockIdx.y * tile, end = min(rows, begin + tile);
    float sum = 0.0F;
    if (column < width) {
        for (int64_t row = begin + lane; row < end; row += 8) sum += widen(x[x_rows[row] + column]);
    }
    sum = lanes_sum(sum);
    if (lane == 0 && column < width) partial[static_cast<int64_t>(blockIdx.y) * width + column] = sum;
}

__global__ void __launch_bounds__(kThreads) column_sum(const float* partial, const float* acc, float* out, int width) {
    const int column = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    if (column >= width) return;
    float sum = acc != nullptr ? acc[column] : 0.0F;
    for (int tile = 0; tile < kTiles; ++tile) sum += partial[static_cast<int64_t>(tile) * width + column];
    out[column] = sum;
}

void sum_rows(const Call& call) {
    const Tensor &dy = call.in[0], &acc = call.in[1], &out = call.out[0];
    const int width = static_cast<int>(width_of(dy));
    if (call.workspace.numel() < int64_t{kTiles} * 4 * width) throw std::invalid_argument("workspace is too small");
    const auto columns = static_cast<unsigned>(divide_up(width, kThreads));
    auto* partial = call.workspace.as<float>();
    with_float(dy.dtype, [&](auto kind) {
        column_partial<<<dim3(static_cast<unsigned>(divide_up(width, 32)), kTiles), kThreads, 0, stream_of(call)>>>(
            dy.as<decltype(kind)>(), rows_of(dy), dy.rows(), width, partial);
    });
    column_sum<<<columns, kThreads, 0, stream_of(call)>>>(partial, acc.as<float>(), out.as<float>(), width);
    check_launch("sum_rows");
}

// Squares are added up in f32 over the few numbers of a pack and in f64 beyond.
template <int kSize>
__global__ void __launch_bounds__(kThreads) squares_partial(const float* x, int64_t n, double* partial) {
    double sum = 0.0;
    const int64_t step = static_cast<int64_t>(kBlocks) * kThreads * kSize;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kSize; i < n; i += step) {
        float a[kSize];
        load<kSize>(x + i, a);
        float part = 0.0F;
#pragma unroll
        for (int e = 0; e < kSize; ++e) part += a[e] * a[e];
        sum += static_cast<double>(part);
    }
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) squares_sum(const double* partial, const double* acc, double* out) {
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < kBlocks; i += kThreads) sum += partial[i];
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) *out = sum + (acc != nullptr ? *acc : 0.0);
}

void sum_squares(const Call& call) {
    const Tensor &x = call.in[0], &acc = call.in[1], &out = call.out[0];
    if (!x.contiguous()) throw std::invalid_argument("sum_squares needs a dense tensor");
    if (call.workspace.numel() < kBlocks * 8) throw std::invalid_argument("workspace is too small");
    auto* partial = call.workspace.as<double>();
    const bool packed = x.numel() % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    if (packed) {
        squares_partial<4><<<kBlocks, kThreads, 0, stream_of(call)>>>(x.as<float>(), x.numel(), partial);
    } else {
        squares_partial<1><<<kBlocks, kThreads, 0, stream_of(call)>>>(x.as<float>(), x.numel(), partial);
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
