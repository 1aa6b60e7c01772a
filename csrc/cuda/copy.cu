// fill: one value everywhere. copy: the same values in another layout, dtype or space.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads) put(T* y, Rows y_rows, int64_t total, int64_t width, T value) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= total) return;
    const int64_t row = i / width;
    y[y_rows[row] + i - row * width] = value;
}

template <typename Fn>
void with_type(DType dtype, const Fn& fn) {
    switch (dtype) {
        case DType::f64:
            return fn(double{});
        case DType::i32:
            return fn(int32_t{});
        case DType::i64:
            return fn(int64_t{});
        case DType::u8:
            return fn(uint8_t{});
        default:
            return with_float(dtype, fn);
    }
}

void fill(const Call& call) {
    const Tensor& y = call.out[0];
    const double value = call.attrs.real("value");
    with_type(y.dtype, [&](auto kind) {
        using T = decltype(kind);
        T held;
        if constexpr (std::is_same_v<T, bf16>) {
            held = __double2bfloat16(value);
        } else {
            held = static_cast<T>(value);
        }
        put<T><<<blocks_for(y.numel()), kThreads, 0, stream_of(call)>>>(y.as<T>(), rows_of(y), y.numel(), width_of(y),
                                                                        held);
    });
    check_launch("fill");
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    convert(const From* x, Rows x_rows, To* y, Rows y_rows, int64_t total, int64_t width) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= total) return;
    const int64_t row = i / width, column = i - row * width;
    const From value = x[x_rows[row] + column];
    if constexpr (std::is_same_v<To, bf16>) {
        y[y_rows[row] + column] = narrow<bf16>(static_cast<float>(value));
    } else if constexpr (std::is_same_v<From, bf16>) {
        y[y_rows[row] + column] = static_cast<To>(widen(value));
    } else {
        y[y_rows[row] + column] = static_cast<To>(value);
    }
}

void copy(const Call& call) {
    const Tensor &x = call.in[0], &y = call.out[0];
    if (x.numel() != y.numel() || x.rank != y.rank) throw std::invalid_argument("copy between different shapes");
    if (x.dtype == y.dtype) {
        const size_t size = size_of(x.dtype);
        if (x.contiguous() && y.contiguous()) {
            check(cudaMemcpyAsync(y.data, x.data, static_cast<size_t>(x.numel()) * size, cudaMemcpyDefault,
                                  stream_of(call)),
                  "copy");
            return;
        }
        const Rows from = rows_of(x), to = rows_of(y);
        if (from.inner == 1 && to.inner == 1) {
            const size_t width = static_cast<size_t>(width_of(x)) * size;
            check(cudaMemcpy2DAsync(y.data, static_cast<size_t>(to.outer) * size, x.data,
                                    static_cast<size_t>(from.outer) * size, width, static_cast<size_t>(x.rows()),
                                    cudaMemcpyDefault, stream_of(call)),
                  "copy");
            return;
        }
    }
    auto floating = [](DType t) { return t == DType::f32 || t == DType::f64 || t == DType::bf16; };
    if (x.dtype != y.dtype && (!floating(x.dtype) || !floating(y.dtype))) {
        throw std::invalid_argument("copy converts between floating dtypes only");
    }
    with_type(x.dtype, [&](auto source) {
        with_type(y.dtype, [&](auto target) {
            using From = decltype(source);
            using To = decltype(target);
            if constexpr (std::is_integral_v<From> == std::is_integral_v<To>) {
                convert<<<blocks_for(x.numel()), kThreads, 0, stream_of(call)>>>(x.as<From>(), rows_of(x), y.as<To>(),
                                                                                 rows_of(y), x.numel(), width_of(x));
            }
        });
    });
    check_launch("copy");
}

SUROGATE_CUDA_KERNEL("fill", fill);
SUROGATE_CUDA_KERNEL("copy", copy);

}  // namespace

}  // namespace surogate::cuda
