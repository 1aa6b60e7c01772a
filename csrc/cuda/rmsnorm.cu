// rmsnorm, add_rmsnorm and their gradient (surogate/ops/rmsnorm.py). A group of threads has a row, and keeps it in
// registers between the sum over it and what is made of it: every operand is read once.
#include <algorithm>

#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

// How a row is shared out: kGroup threads with kHeld packs each, in turn; with kHeld 0 a row is too long (or too odd)
// to be held and is read twice.
template <typename T, int kSizeOf, int kGroupOf, int kHeldOf>
struct Shape {
    using Element = T;
    using P = Pack<T, kSizeOf>;
    static constexpr int kSize = kSizeOf, kGroup = kGroupOf, kHeld = kHeldOf;
    static constexpr int kBlock = kGroup > kThreads ? kGroup : kThreads;
    static constexpr int kRows = kBlock / kGroup;  // of a block at a time
    static constexpr int kStep = kGroup * kSize;   // elements from a thread's pack to its next one
};

template <typename T, typename Fn>
void with_shape(int width, bool packed, const Fn& fn) {
    if (!packed) return width <= 128 ? fn(Shape<T, 1, 32, 0>{}) : fn(Shape<T, 1, 256, 0>{});
    const int count = width / kPack;
    if (count <= 8) return fn(Shape<T, kPack, 8, 1>{});
    if (count <= 16) return fn(Shape<T, kPack, 16, 1>{});
    if (count <= 32) return fn(Shape<T, kPack, 32, 1>{});
    if (count <= 64) return fn(Shape<T, kPack, 32, 2>{});
    if (count <= 128) return fn(Shape<T, kPack, 64, 2>{});
    if (count <= 256) return fn(Shape<T, kPack, 128, 2>{});
    if (count <= 512) return fn(Shape<T, kPack, 256, 2>{});
    if (count <= 1024) return fn(Shape<T, kPack, 512, 2>{});
    fn(Shape<T, kPack, 256, 0>{});
}

struct Norm {
    const void *x, *r;
    void *h, *y;
    float* rstd;
    Rows x_rows, r_rows, h_rows, y_rows, rstd_rows;
    Weights w;
    uint32_t rows;
    int width;
    float inverse, eps;  // 1 / width
};

template <typename S>
__device__ float squares(const typename S::P& h) {
    float sum = 0.0F;
#pragma unroll
    for (int e = 0; e < S::kSize; ++e) sum += h[e] * h[e];
    return sum;
}

// The sum as it is stored: the norm is of that.
template <typename S>
__device__ typename S::P sum_of(typename S::P x, const typename S::P& r) {
#pragma unroll
    for (int e = 0; e < S::kSize; ++e) x.set(e, x[e] + r[e]);
    return x;
}

template <typename S>
__device__ typename S::P scaled(const typename S::P& h, float rstd, const Weights& weights, int c) {
    float w[S::kSize];
    weights.load(c, w);
    typename S::P y;
#pragma unroll
    for (int e = 0; e < S::kSize; ++e) y.set(e, h[e] * rstd * w[e]);
    return y;
}

// y = w * h * rstd of h = x, or of h = x + r, which is stored. h and y may take the storage of x and r: a thread reads
// what it has of a row before it writes there. Threads without a row (the last block's) only take part in the sums.
template <typename S, bool kAdd>
__global__ void __launch_bounds__(S::kBlock) normalise(Norm n) {
    using T = typename S::Element;
    using P = typename S::P;
    const uint32_t row = blockIdx.x * S::kRows + threadIdx.x / S::kGroup;
    const int lane = static_cast<int>(threadIdx.x) % S::kGroup;
    const int width = row < n.rows ? n.width : 0;
    const T* x = static_cast<const T*>(n.x) + n.x_rows[row];
    const T* r = kAdd ? static_cast<const T*>(n.r) + n.r_rows[row] : nullptr;
    T* h = kAdd ? static_cast<T*>(n.h) + n.h_rows[row] : nullptr;
    T* y = static_cast<T*>(n.y) + n.y_rows[row];
    float sum = 0.0F;

    if constexpr (S::kHeld > 0) {
        P held[S::kHeld];
#pragma unroll
        for (int k = 0; k < S::kHeld; ++k) {
            const int c = lane * S::kSize + k * S::kStep;
            if (c < width) held[k] = P::at(x + c);
        }
        if constexpr (kAdd) {
            P other[S::kHeld];
#pragma unroll
            for (int k = 0; k < S::kHeld; ++k) {
                const int c = lane * S::kSize + k * S::kStep;
                if (c < width) other[k] = P::at(r + c);
            }
#pragma unroll
            for (int k = 0; k < S::kHeld; ++k) {
                const int c = lane * S::kSize + k * S::kStep;
                if (c < width) held[k] = sum_of<S>(held[k], other[k]), held[k].put(h + c);
            }
        }
#pragma unroll
        for (int k = 0; k < S::kHeld; ++k) {
            if (lane * S::kSize + k * S::kStep < width) sum += squares<S>(held[k]);
        }
        const float rstd = rsqrtf(group_sum<S::kGroup>(sum) * n.inverse + n.eps);
        if (width == 0) return;
        if (lane == 0) n.rstd[n.rstd_rows[row]] = rstd;
#pragma unroll
        for (int k = 0; k < S::kHeld; ++k) {
            const int c = lane * S::kSize + k * S::kStep;
            if (c < width) scaled<S>(held[k], rstd, n.w, c).put(y + c);
        }
    } else {
        for (int c = lane * S::kSize; c < width; c += S::kStep) {
            P value = P::at(x + c);
            if constexpr (kAdd) value = sum_of<S>(value, P::at(r + c)), value.put(h + c);
            sum += squares<S>(value);
        }
        const float rstd = rsqrtf(group_sum<S::kGroup>(sum) * n.inverse + n.eps);
        if (width == 0) return;
        if (lane == 0) n.rstd[n.rstd_rows[row]] = rstd;
        const T* again = kAdd ? h : x;
        for (int c = lane * S::kSize; c < width; c += S::kStep) {
            scaled<S>(P::at(again + c), rstd, n.w, c).put(y + c);
        }
    }
}

template <bool kAdd>
void launch(const Call& call, const Norm& n, DType dtype, bool packed) {
    if (n.rows == 0 || n.width == 0) return;
    with_float(dtype, [&](auto kind) {
        with_shape<decltype(kind)>(n.width, packed, [&](auto shape) {
            using S = decltype(shape);
            normalise<S, kAdd><<<blocks_for(n.rows, S::kRows), S::kBlock, 0, stream_of(call)>>>(n);
        });
    });
    check_launch("rmsnorm");
}

void rmsnorm(const Call& call) {
    const Tensor &x = call.in[0], &w = call.in[1], &y = call.out[0], &rstd = call.out[1];
    expect_dtype(y, x.dtype, "y");
    const Norm n{.x = x.data,
                 .r = nullptr,
                 .h = nullptr,
                 .y = y.data,
                 .rstd = rstd.as<float>(),
                 .x_rows = Rows(x),
                 .r_rows = {},
                 .h_rows = {},
                 .y_rows = Rows(y),
                 .rstd_rows = Rows(rstd, 0),
                 .w = Weights(w),
                 .rows = rows_in(x),
                 .width = width_in(x),
                 .inverse = 1.0F / static_cast<float>(width_of(x)),
                 .eps = static_cast<float>(call.attrs.real("eps"))};
    launch<false>(call, n, x.dtype, packs(x) && packs(w) && packs(y));
}

void add_rmsnorm(const Call& call) {
    const Tensor &x = call.in[0], &r = call.in[1], &w = call.in[2];
    const Tensor &h = call.out[0], &y = call.out[1], &rstd = call.out[2];
    for (const Tensor* t : {&r, &h, &y}) expect_dtype(*t, x.dtype, "an operand or result");
    const Norm n{.x = x.data,
                 .r = r.data,
                 .h = h.data,
                 .y = y.data,
                 .rstd = rstd.as<float>(),
                 .x_rows = Rows(x),
                 .r_rows = Rows(r),
                 .h_rows = Rows(h),
                 .y_rows = Rows(y),
                 .rstd_rows = Rows(rstd, 0),
                 .w = Weights(w),
                 .rows = rows_in(x),
                 .width = width_in(x),
                 .inverse = 1.0F / static_cast<float>(width_of(x)),
                 .eps = static_cast<float>(call.attrs.real("eps"))};
    launch<true>(call, n, x.dtype, packs(x) && packs(r) && packs(w) && packs(h) && packs(y));
}

// Partial weight gradients at most; surogate/ops/rmsnorm.py plans their room. Enough blocks to fill a large GPU, and
// short rows want more.
int most_tiles(int width) { return 256 * std::clamp(1024 / width, 1, 4); }

struct Backward {
    const void *dy, *x, *acc;
    const float* rstd;
    void* dx;        // may be null
    float* partial;  // [blocks, width]; null: the weight gradient is not wanted
    Rows dy_rows, x_rows, acc_rows, dx_rows, rstd_rows;
    Weights w;
    uint32_t rows;
    int width;
    float inverse;  // 1 / width
};

// The part that one pack has of the sum of a * x, a = dy * w.
template <typename S>
__device__ float dot(const typename S::P& dy, const typename S::P& x, const Weights& weights, int c) {
    float w[S::kSize], sum = 0.0F;
    weights.load(c, w);
#pragma unroll
    for (int e = 0; e < S::kSize; ++e) sum += dy[e] * w[e] * x[e];
    return sum;
}

// dx = rstd * a - along * x (+ acc), which is rstd * (a - n * mean(a n)) with n = x * rstd.
template <typename S>
__device__ void write(const Backward& b, uint32_t row, int c, const typename S::P& dy, const typename S::P& x,
                      float rstd, float along) {
    using T = typename S::Element;
    float w[S::kSize];
    b.w.load(c, w);
    typename S::P dx, acc;
    if (b.acc != nullptr) acc = S::P::at(static_cast<const T*>(b.acc) + b.acc_rows[row] + c);
#pragma unroll
    for (int e = 0; e < S::kSize; ++e) {
        const float d = rstd * dy[e] * w[e] - along * x[e];
        dx.set(e, b.acc != nullptr ? acc[e] + d : d);
    }
    dx.put(static_cast<T*>(b.dx) + b.dx_rows[row] + c);
}

// The sums of a block's groups, in order, column by column.
template <typename S>
__device__ void add_up(const float (&dw)[S::kHeld][S::kSize], float* to, int width) {
    const int lane = static_cast<int>(threadIdx.x) % S::kGroup, place = static_cast<int>(threadIdx.x) / S::kGroup;
    if constexpr (S::kRows == 1) {
        static_cast<void>(place);
#pragma unroll
        for (int k = 0; k < S::kHeld; ++k) {
            const int c = lane * S::kSize + k * S::kStep;
            if (c >= width) break;
#pragma unroll
            for (int e = 0; e < S::kSize; ++e) to[c + e] = dw[k][e];
        }
    } else {
        __shared__ float sums[S::kRows][S::kStep];
#pragma unroll
        for (int k = 0; k < S::kHeld; ++k) {
            __syncthreads();
#pragma unroll
            for (int e = 0; e < S::kSize; ++e) sums[place][lane * S::kSize + e] = dw[k][e];
            __syncthreads();
            for (int i = static_cast<int>(threadIdx.x); i < S::kStep && k * S::kStep + i < width; i += S::kBlock) {
                float sum = 0.0F;
#pragma unroll
                for (int r = 0; r < S::kRows; ++r) sum += sums[r][i];
                to[k * S::kStep + i] = sum;
            }
        }
    }
}

// dx, and dw if kWeight, in one pass over rows that are held: a block has rows blockIdx.x * kRows + threadIdx.x /
// kGroup and every gridDim.x * kRows further. For dw a block has several, and the next is on its way while one is
// worked on. dx may be dy, x or acc.
template <typename S, bool kWeight>
__global__ void __launch_bounds__(S::kBlock, sizeof(typename S::Element) == 2 ? 512 / S::kBlock : 1)
    gradients(Backward b) {
    using T = typename S::Element;
    using P = typename S::P;
    const int lane = static_cast<int>(threadIdx.x) % S::kGroup, place = static_cast<int>(threadIdx.x) / S::kGroup;
    const uint32_t step = gridDim.x * S::kRows;
    float dw[S::kHeld][S::kSize] = {};
    P dy[S::kHeld], x[S::kHeld];
    float rstd = 0.0F;
    auto fetch = [&](uint32_t row, P(&to_dy)[S::kHeld], P(&to_x)[S::kHeld], float& to_rstd) {
        const int width = row < b.rows ? b.width : 0;
        const T* from_dy = static_cast<const T*>(b.dy) + b.dy_rows[row];
        const T* from_x = static_cast<const T*>(b.x) + b.x_rows[row];
        if (width > 0) to_rstd = b.rstd[b.rstd_rows[row]];
#pragma unroll
        for (int k = 0; k < S::kHeld; ++k) {
            const int c = lane * S::kSize + k * S::kStep;
            if (c < width) to_dy[k] = P::at(from_dy + c), to_x[k] = P::at(from_x + c);
        }
    };
    fetch(blockIdx.x * S::kRows + place, dy, x, rstd);
    // By the block's first row, so that all its threads take part in every sum.
    for (uint32_t first = blockIdx.x * S::kRows; first < b.rows; first += step) {
        const uint32_t row = first + place;
        const int width = row < b.rows ? b.width : 0;
        P next_dy[S::kHeld], next_x[S::kHeld];
        float next_rstd = 0.0F;
        if constexpr (kWeight) fetch(row + step, next_dy, next_x, next_rstd);
        if (b.dx != nullptr) {
            float sum = 0.0F;
#pragma unroll
            for (int k = 0; k < S::kHeld; ++k) {
                const int c = lane * S::kSize + k * S::kStep;
                if (c < width) sum += dot<S>(dy[k], x[k], b.w, c);
            }
            const float along = rstd * rstd * rstd * group_sum<S::kGroup>(sum) * b.inverse;
#pragma unroll
            for (int k = 0; k < S::kHeld; ++k) {
                const int c = lane * S::kSize + k * S::kStep;
                if (c < width) write<S>(b, row, c, dy[k], x[k], rstd, along);
            }
        }
        if constexpr (kWeight) {
#pragma unroll
            for (int k = 0; k < S::kHeld; ++k) {
                if (lane * S::kSize + k * S::kStep < width) {
#pragma unroll
                    for (int e = 0; e < S::kSize; ++e) dw[k][e] += dy[k][e] * (x[k][e] * rstd);
                }
                dy[k] = next_dy[k], x[k] = next_x[k];
            }
            rstd = next_rstd;
        }
    }
    if constexpr (kWeight) add_up<S>(dw, b.partial + static_cast<int64_t>(blockIdx.x) * b.width, b.width);
}

// dx for rows that are not held. dx may be dy, x or acc: every thread reads again only what it alone writes.
template <typename S>
__global__ void __launch_bounds__(S::kBlock) input_gradient(Backward b) {
    using T = typename S::Element;
    const uint32_t row = blockIdx.x * S::kRows + threadIdx.x / S::kGroup;
    const bool mine = row < b.rows;
    const int lane = static_cast<int>(threadIdx.x) % S::kGroup;
    const T* dy = mine ? static_cast<const T*>(b.dy) + b.dy_rows[row] : nullptr;
    const T* x = mine ? static_cast<const T*>(b.x) + b.x_rows[row] : nullptr;
    float sum = 0.0F;
    for (int c = lane * S::kSize; mine && c < b.width; c += S::kStep) {
        sum += dot<S>(S::P::at(dy + c), S::P::at(x + c), b.w, c);
    }
    sum = group_sum<S::kGroup>(sum);
    if (!mine) return;
    const float rstd = b.rstd[b.rstd_rows[row]];
    const float along = rstd * rstd * rstd * sum * b.inverse;
    for (int c = lane * S::kSize; c < b.width; c += S::kStep) {
        write<S>(b, row, c, S::P::at(dy + c), S::P::at(x + c), rstd, along);
    }
}

// dw for rows that are not held: a thread a column, a tile of rows in grid.y.
template <typename T>
__global__ void __launch_bounds__(kThreads) weight_gradient(Backward b) {
    const int column = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    if (column >= b.width) return;
    float sum = 0.0F;
#pragma unroll 4
    for (uint32_t row = blockIdx.y; row < b.rows; row += gridDim.y) {
        const float dy = widen(static_cast<const T*>(b.dy)[b.dy_rows[row] + column]);
        const float x = widen(static_cast<const T*>(b.x)[b.x_rows[row] + column]);
        sum += dy * (x * b.rstd[b.rstd_rows[row]]);
    }
    b.partial[static_cast<int64_t>(blockIdx.y) * b.width + column] = sum;
}

void rmsnorm_backward(const Call& call) {
    const Tensor &dy = call.in[0], &x = call.in[1], &w = call.in[2], &rstd = call.in[3];
    const Tensor &acc_dx = call.in[4], &acc_dw = call.in[5], &dx = call.out[0], &dw = call.out[1];
    for (const Tensor* t : {&dy, &acc_dx, &dx}) expect_dtype(*t, x.dtype, "an operand or result");
    if (width_of(x) == 0) return;
    const int most = most_tiles(width_in(x));
    const Backward b{.dy = dy.data,
                     .x = x.data,
                     .acc = acc_dx.data,
                     .rstd = rstd.as<float>(),
                     .dx = dx.data,
                     .partial = dw ? workspace_of<float>(call, int64_t{most} * width_of(x)) : nullptr,
                     .dy_rows = Rows(dy),
                     .x_rows = Rows(x),
                     .acc_rows = Rows(acc_dx),
                     .dx_rows = Rows(dx),
                     .rstd_rows = Rows(rstd, 0),
                     .w = Weights(w),
                     .rows = rows_in(x),
                     .width = width_in(x),
                     .inverse = 1.0F / static_cast<float>(width_of(x))};
    const bool packed = packs(dy) && packs(x) && packs(w) && packs(acc_dx) && packs(dx);
    unsigned tiles = 0;
    if (b.rows > 0) {
        with_float(x.dtype, [&](auto kind) {
            using T = decltype(kind);
            with_shape<T>(b.width, packed, [&](auto shape) {
                using S = decltype(shape);
                const unsigned blocks = blocks_for(b.rows, S::kRows);
                if constexpr (S::kHeld > 0) {
                    if (b.partial != nullptr) {
                        tiles = std::min(blocks, static_cast<unsigned>(most));
                        gradients<S, true><<<tiles, S::kBlock, 0, stream_of(call)>>>(b);
                    } else {
                        gradients<S, false><<<blocks, S::kBlock, 0, stream_of(call)>>>(b);
                    }
                } else {
                    if (b.partial != nullptr) {  // first: dx may take the storage of its operands
                        tiles = std::min(b.rows, static_cast<unsigned>(most));
                        const dim3 grid(blocks_for(b.width), tiles);
                        weight_gradient<T><<<grid, kThreads, 0, stream_of(call)>>>(b);
                    }
                    if (b.dx != nullptr) input_gradient<S><<<blocks, S::kBlock, 0, stream_of(call)>>>(b);
                }
            });
        });
        check_launch("rmsnorm_backward");
    }
    if (dw) sum_partials(b.partial, static_cast<int>(tiles), b.width, acc_dw, dw, stream_of(call));
}

SUROGATE_CUDA_KERNEL("rmsnorm", rmsnorm);
SUROGATE_CUDA_KERNEL("add_rmsnorm", add_rmsnorm);
SUROGATE_CUDA_KERNEL("rmsnorm_backward", rmsnorm_backward);

}  // namespace

}  // namespace surogate::cuda
