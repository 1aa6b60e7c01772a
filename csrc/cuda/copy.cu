// fill: one value everywhere. copy: the same values in another layout, dtype or space.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

// Calls fn with a value of the C++ type of a dtype.
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

constexpr int kUnroll = 4;

// Dense memory in sixteen bytes of one value over and over, and what is left behind them.
__global__ void __launch_bounds__(kThreads) fill_bytes(uint4* to, int64_t count, uint4 pattern, int left) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < count) to[first + u * kThreads] = pattern;
    }
    if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < left) {
        reinterpret_cast<char*>(to + count)[threadIdx.x] = reinterpret_cast<const char*>(&pattern)[threadIdx.x];
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) fill_elements(T* y, Rows rows, uint32_t count, Divider width, T value) {
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= count) return;
    const uint32_t row = width.quotient(i);
    y[rows[row] + (i - row * width.divisor())] = value;
}

void fill(const Call& call) {
    const Tensor& y = call.out[0];
    const int64_t count = y.numel();
    if (count == 0) return;
    const double value = call.attrs.real("value");
    with_type(y.dtype, [&](auto kind) {
        using T = decltype(kind);
        T held;
        if constexpr (std::is_same_v<T, bf16>) {
            held = narrow_double(value);
        } else {
            held = static_cast<T>(value);
        }
        if (y.contiguous() && reinterpret_cast<uintptr_t>(y.data) % sizeof(uint4) == 0) {
            uint4 pattern;
            for (size_t at = 0; at < sizeof pattern; at += sizeof held) {
                std::memcpy(reinterpret_cast<char*>(&pattern) + at, &held, sizeof held);
            }
            const int64_t bytes = count * static_cast<int64_t>(sizeof held);
            const int64_t pieces = bytes / static_cast<int64_t>(sizeof pattern);
            const unsigned blocks = pieces > 0 ? blocks_for(pieces, kThreads * kUnroll) : 1;
            fill_bytes<<<blocks, kThreads, 0, stream_of(call)>>>(
                y.as<uint4>(), pieces, pattern, static_cast<int>(bytes % static_cast<int64_t>(sizeof pattern)));
        } else {
            if (count > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
            fill_elements<T><<<blocks_for(count), kThreads, 0, stream_of(call)>>>(
                y.as<T>(), Rows(y), static_cast<uint32_t>(count), Divider(width_of(y)), held);
        }
    });
    check_launch("fill");
}

template <typename To, typename From>
__device__ To convert(From x) {
    if constexpr (std::is_same_v<To, From>) {
        return x;
    } else if constexpr (std::is_same_v<To, bf16> && std::is_same_v<From, double>) {
        return narrow_double(x);
    } else if constexpr (std::is_same_v<To, bf16>) {
        return narrow<bf16>(x);
    } else if constexpr (std::is_same_v<From, bf16>) {
        return static_cast<To>(widen(x));
    } else {
        return static_cast<To>(x);
    }
}

template <typename From, typename To, int kSize>
__global__ void __launch_bounds__(kThreads) copy_packs(const From* x, Rows x_rows, To* y, Rows y_rows, Walk walk) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
    Pack<From, kSize> packs[kUnroll];
    Place places[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        const int64_t pack = first + u * kThreads;
        if (pack >= walk.packs) break;
        places[u] = Place(walk, pack, kSize);
        packs[u] = Pack<From, kSize>::at(x + places[u].in(x_rows));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads >= walk.packs) return;
        Pack<To, kSize> to;
#pragma unroll
        for (int e = 0; e < kSize; ++e) to.items[e] = convert<To>(packs[u].items[e]);
        to.put(y + places[u].in(y_rows));
    }
}

// Copies that the runtime does itself, also from and to the host.
bool copy_bytes(const Call& call, const Tensor& x, const Tensor& y) {
    if (x.dtype != y.dtype) return false;
    const auto size = static_cast<int64_t>(size_of(x.dtype));
    if (x.contiguous() && y.contiguous()) {
        check(
            cudaMemcpyAsync(y.data, x.data, static_cast<size_t>(x.numel() * size), cudaMemcpyDefault, stream_of(call)),
            "copy");
        return true;
    }
    const Rows from(x), to(y);
    if (!from.even() || !to.even()) return false;
    check(cudaMemcpy2DAsync(y.data, static_cast<size_t>(to.distance() * size), x.data,
                            static_cast<size_t>(from.distance() * size), static_cast<size_t>(width_of(x) * size),
                            static_cast<size_t>(x.rows()), cudaMemcpyDefault, stream_of(call)),
          "copy");
    return true;
}

void copy(const Call& call) {
    const Tensor &x = call.in[0], &y = call.out[0];
    if (x.rank != y.rank || !std::equal(x.shape, x.shape + x.rank, y.shape)) {
        throw std::invalid_argument("copy between different shapes");
    }
    auto floating = [](DType t) { return t == DType::f32 || t == DType::f64 || t == DType::bf16; };
    if (x.dtype != y.dtype && (!floating(x.dtype) || !floating(y.dtype))) {
        throw std::invalid_argument("copy converts between floating dtypes only");
    }
    if (x.numel() == 0 || copy_bytes(call, x, y)) return;
    const Walk walk(x, y);
    const unsigned blocks = blocks_for(walk.packs, kThreads * kUnroll);
    with_type(x.dtype, [&](auto source) {
        with_type(y.dtype, [&](auto target) {
            using From = decltype(source);
            using To = decltype(target);
            if constexpr (std::is_same_v<From, To> || (!std::is_integral_v<From> && !std::is_integral_v<To>)) {
                auto run = [&](auto size) {
                    copy_packs<From, To, decltype(size)::value><<<blocks, kThreads, 0, stream_of(call)>>>(
                        x.as<From>(), walk.rows(x), y.as<To>(), walk.rows(y), walk);
                };
                if (walk.size == kPack) return run(std::integral_constant<int, kPack>{});
                run(std::integral_constant<int, 1>{});
            }
        });
    });
    check_launch("copy");
}

SUROGATE_CUDA_KERNEL("fill", fill);
SUROGATE_CUDA_KERNEL("copy", copy);

}  // namespace

}  // namespace surogate::cuda
