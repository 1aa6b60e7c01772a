// rmsnorm, add_rmsnorm and their gradient (surogate/ops/rmsnorm.py). A group of threads a row: a warp for short rows, a
// block for long ones.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

constexpr int kTiles = 64;  // partial weight gradients; surogate/ops/rmsnorm.py plans their room

// Threads of a row: as many as it has packs of 8, so that short rows (a head of q) do not idle half a warp.
template <typename Fn>
void with_group(int64_t width, const Fn& fn) {
    if (width <= 128) return fn(std::integral_constant<int, 16>{});
    if (width <= 512) return fn(std::integral_constant<int, 32>{});
    if (width <= 1024) return fn(std::integral_constant<int, 128>{});
    fn(std::integral_constant<int, 256>{});
}

// Threads of a block: several rows where a row takes less than a warp or a warp, else one row.
template <int kGroup>
constexpr int kBlockOf = kGroup <= 32 ? 256 : kGroup;

// The sum over the threads of a row. Rows beyond the last must take part in it.
template <int kGroup>
__device__ float group_sum(float x) {
    if constexpr (kGroup <= 32) {
#pragma unroll
        for (int lane = kGroup / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffU, x, lane);
        return x;
    } else {
        return block_sum<kGroup>(x);
    }
}

void need_dense(const Tensor& rstd) {
    if (!rstd.contiguous()) throw std::invalid_argument("rstd must be dense");
}

struct Norm {
    const void *x, *r, *w;
    void *h, *y;
    float* rstd;
    Rows x_rows, r_rows, h_rows, y_rows;
    int64_t rows;
    int width;
    float eps;
};

// One row: h = x + r where kAdd (h is stored, and the norm is of what is stored), y = w * h * rstd.
template <typename T, typename W, int kSize, int kGroup, bool kAdd>
__global__ void __launch_bounds__(kBlockOf<kGroup>) normalise(Norm n) {
    constexpr int kRowsABlock = kBlockOf<kGroup> / kGroup;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * kRowsABlock + threadIdx.x / kGroup;
    const bool inside = place < n.rows;  // a group beyond the last row does its neighbour's sums and writes nothing
    const int64_t row = inside ? place : n.rows - 1;
    const int lane = static_cast<int>(threadIdx.x) % kGroup;
    const T* x = static_cast<const T*>(n.x) + n.x_rows[row];
    const T* r = kAdd ? static_cast<const T*>(n.r) + n.r_rows[row] : nullptr;
    T* h = kAdd ? static_cast<T*>(n.h) + n.h_rows[row] : nullptr;
    T* y = static_cast<T*>(n.y) + n.y_rows[row];
    const W* w = static_cast<const W*>(n.w);

    constexpr int kKept = 3;  // packs a thread keeps in registers; what is beyond is read again
    float kept[kKept][kSize];
    float sum = 0.0F;
    int count = 0;
    for (int c = lane * kSize; c < n.width; c += kGroup * kSize, ++count) {
        float a[kSize];
        load<kSize>(x + c, a);
        if constexpr (kAdd) {
            float b[kSize];
            load<kSize>(r + c, b);
#pragma unroll
            for (int e = 0; e < kSize; ++e) a[e] = widen(narrow<T>(a[e] + b[e]));
            if (inside) store<kSize>(h + c, a);
        }
#pragma unroll
        for (int e = 0; e < kSize; ++e) sum += a[e] * a[e];
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            if (k == count) {
#pragma unroll
                for (int e = 0; e < kSize; ++e) kept[k][e] = a[e];
            }
        }
    }
    const float rstd = rsqrtf(group_sum<kGroup>(sum) / static_cast<float>(n.width) + n.eps);
    if (!inside) return;
    if (lane == 0) n.rstd[row] = rstd;
    const T* again = kAdd ? h : x;
    count = 0;
    for (int c = lane * kSize; c < n.width; c += kGroup * kSize, ++count) {
        float a[kSize], b[kSize];
        bool held = false;
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            if (k == count) {
                held = true;
#pragma unroll
                for (int e = 0; e < kSize; ++e) a[e] = kept[k][e];
            }
        }
        if (!held) load<kSize>(again + c, a);
        load<kSize>(w + c, b);
#pragma unroll
        for (int e = 0; e < kSize; ++e) a[e] *= rstd * b[e];
        store<kSize>(y + c, a);
    }
}

template <bool kAdd>
void launch(const Call& call, const Norm& n, const Tensor& x, const Tensor& w, bool packed) {
    with_float(x.dtype, [&](auto kind) {
        with_float(w.dtype, [&](auto weight) {
            with_group(n.width, [&](auto group) {
                using T = decltype(kind);
                using W = decltype(weight);
                constexpr int kGroup = decltype(group)::value;
                constexpr int kBlock = kBlockOf<kGroup>;
                const auto blocks = static_cast<unsigned>(divide_up(n.rows, kBlock / kGroup));
                if (packed) {
                    normalise<T, W, 8, kGroup, kAdd><<<blocks, kBlock, 0, stream_of(call)>>>(n);
                } else {
                    normalise<T, W, 1, kGroup, kAdd><<<blocks, kBlock, 0, stream_of(call)>>>(n);
                }
            });
        });
    });
    check_launch("rmsnorm");
}

void rmsnorm(const Call& call) {
    const Tensor &x = call.in[0], &w = call.in[1], &y = call.out[0], &rstd = call.out[1];
    need_dense(rstd);
    Norm n{};
    n.x = x.data, n.w = w.data, n.y = y.data, n.rstd = rstd.as<float>();
    n.x_rows = rows_of(x), n.y_rows = rows_of(y);
    n.rows = x.rows(), n.width = static_cast<int>(width_of(x)), n.eps = static_cast<float>(call.attrs.real("eps"));
    launch<false>(call, n, x, w, packs(x, 8) && packs(w, 8) && packs(y, 8));
}

void add_rmsnorm(const Call& call) {
    const Tensor &x = call.in[0], &r = call.in[1], &w = call.in[2];
    const Tensor &h = call.out[0], &y = call.out[1], &rstd = call.out[2];
    need_dense(rstd);
    Norm n{};
    n.x = x.data, n.r = r.data, n.w = w.data, n.h = h.data, n.y = y.data, n.rstd = rstd.as<float>();
    n.x_rows = rows_of(x), n.r_rows = rows_of(r), n.h_rows = rows_of(h), n.y_rows = rows_of(y);
    n.rows = x.rows(), n.width = static_cast<int>(width_of(x)), n.eps = static_cast<float>(call.attrs.real("eps"));
    launch<true>(call, n, x, w, packs(x, 8) && packs(r, 8) && packs(w, 8) && packs(h, 8) && packs(y, 8));
}

struct Backward {
    const void *dy, *x, *w, *acc;
    const float* rstd;
    void* dx;
    float* partial;
    Rows dy_rows, x_rows, acc_rows, dx_rows;
    int64_t rows;
    int width;
};

// dx = rstd * (a - n * mean(a n)) + acc, with a = dy w and n = x rstd. dx may be dy or acc.
template <typename T, typename W, int kSize, int kGroup>
__global__ void __launch_bounds__(kBlockOf<kGroup>) input_gradient(Backward b) {
    constexpr int kRowsABlock = kBlockOf<kGroup> / kGroup;
    const int64_t place = static_cast<int64_t>(blockIdx.x) * kRowsABlock + threadIdx.x / kGroup;
    const bool inside = place < b.rows;
    const int64_t row = inside ? place : b.rows - 1;
    const int lane = static_cast<int>(threadIdx.x) % kGroup;
    const T* dy = static_cast<const T*>(b.dy) + b.dy_rows[row];
    const T* x = static_cast<const T*>(b.x) + b.x_rows[row];
    const T* acc = b.acc != nullptr ? static_cast<const T*>(b.acc) + b.acc_rows[row] : nullptr;
    T* dx = static_cast<T*>(b.dx) + b.dx_rows[row];
    const W* w = static_cast<const W*>(b.w);
    const float rstd = b.rstd[row];
    float sum = 0.0F;
    for (int c = lane * kSize; c < b.width; c += kGroup * kSize) {
        float g[kSize], a[kSize], v[kSize];
        load<kSize>(dy + c, g);
        load<kSize>(x + c, a);
        load<kSize>(w + c, v);
#pragma unroll
        for (int e = 0; e < kSize; ++e) sum += g[e] * v[e] * a[e];
    }
    const float mean = group_sum<kGroup>(sum) * rstd / static_cast<float>(b.width);
    if (!inside) return;
    for (int c = lane * kSize; c < b.width; c += kGroup * kSize) {
        float g[kSize], a[kSize], v[kSize];
        load<kSize>(dy + c, g);
        load<kSize>(x + c, a);
        load<kSize>(w + c, v);
#pragma unroll
        for (int e = 0; e < kSize; ++e) g[e] = rstd * (g[e] * v[e] - a[e] * rstd * mean);
        if (acc != nullptr) {
            load<kSize>(acc + c, a);
#pragma unroll
            for (int e = 0; e < kSize; ++e) g[e] += a[e];
        }
        store<kSize>(dx + c, g);
    }
}

// Sum of dy * x * rstd over the rows of a tile: a block 32 columns, eight rows at a time.
template <typename T>
__global__ void __launch_bounds__(256) weight_partial(Backward b) {
    const int column = static_cast<int>(blockIdx.x * 32 + threadIdx.x % 32), lane = static_cast<int>(threadIdx.x / 32);
    const int64_t tile = (b.rows + kTiles - 1) / kTiles;
    const int64_t begin = blockIdx.y * tile, end = min(b.rows, begin + tile);
    float sum = 0.0F;
    if (column < b.width) {
        for (int64_t row = begin + lane; row < end; row += 8) {
            sum += widen(static_cast<const T*>(b.dy)[b.dy_rows[row] + column]) *
                   widen(static_cast<const T*>(b.x)[b.x_rows[row] + column]) * b.rstd[row];
        }
    }
    sum = lanes_sum(sum);
    if (lane == 0 && column < b.width) b.partial[static_cast<int64_t>(blockIdx.y) * b.width + column] = sum;
}

__global__ void __launch_bounds__(256) weight_sum(const float* partial, const float* acc, float* dw, int width) {
    const int column = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
    if (column >= width) return;
    float sum = acc != nullptr ? acc[column] : 0.0F;
    for (int tile = 0; tile < kTiles; ++tile) sum += partial[static_cast<int64_t>(tile) * width + column];
    dw[column] = sum;
}

void rmsnorm_backward(const Call& call) {
    const Tensor &dy = call.in[0], &x = call.in[1], &w = call.in[2], &rstd = call.in[3];
    const Tensor &acc_dx = call.in[4], &acc_dw = call.in[5], &dx = call.out[0], &dw = call.out[1];
    need_dense(rstd);
    Backward b{};
    b.dy = dy.data, b.x = x.data, b.w = w.data, b.rstd = rstd.as<float>();
    b.dy_rows = rows_of(dy), b.x_rows = rows_of(x);
    b.rows = x.rows(), b.width = static_cast<int>(width_of(x));
    const auto columns = static_cast<unsigned>(divide_up(b.width, 256));
    if (dw) {  // first: dx may take dy's storage
        if (call.workspace.numel() < kTiles * 4 * b.width) throw std::invalid_argument("workspace is too small");
        b.partial = call.workspace.as<float>();
        with_float(x.dtype, [&](auto kind) {
            weight_partial<decltype(kind)>
                <<<dim3(static_cast<unsigned>(divide_up(b.width, 32)), kTiles), 256, 0, stream_of(call)>>>(b);
        });
        weight_sum<<<columns, 256, 0, stream_of(call)>>>(b.partial, acc_dw.as<float>(), dw.as<float>(), b.width);
        check_launch("rmsnorm_backward");
    }
    if (!dx) return;
    b.dx = dx.data, b.dx_rows = rows_of(dx);
    if (acc_dx) b.acc = acc_dx.data, b.acc_rows = rows_of(acc_dx);
    const bool packed = packs(dy, 8) && packs(x, 8) && packs(w, 8) && packs(acc_dx, 8) && packs(dx, 8);
    with_float(x.dtype, [&](auto kind) {
        with_float(w.dtype, [&](auto weight) {
            with_group(b.width, [&](auto group) {
                using T = decltype(kind);
                using W = decltype(weight);
                constexpr int kGroup = decltype(group)::value;
                constexpr int kBlock = kBlockOf<kGroup>;
                const auto blocks = static_cast<unsigned>(divide_up(b.rows, kBlock / kGroup));
                if (packed) {
                    input_gradient<T, W, 8, kGroup><<<blocks, kBlock, 0, stream_of(call)>>>(b);
                } else {
                    input_gradient<T, W, 1, kGroup><<<blocks, kBlock, 0, stream_of(call)>>>(b);
                }
            });
        });
    });
    check_launch("rmsnorm_backward");
}

SUROGATE_CUDA_KERNEL("rmsnorm", rmsnorm);
SUROGATE_CUDA_KERNEL("add_rmsnorm", add_rmsnorm);
SUROGATE_CUDA_KERNEL("rmsnorm_backward", rmsnorm_backward);

}  // namespace

}  // namespace surogate::cuda
