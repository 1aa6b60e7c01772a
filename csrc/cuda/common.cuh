// What our kernels share: rows of strided tensors, sixteen-byte accesses, sums in a fixed order, launches.
//
// Storage is f32 or bf16, arithmetic is f32. Nothing here or in the kernels adds with atomics, so results are the same
// bits every time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/kernel.h"
#include "cuda/plugin.h"

namespace surogate::cuda {

using bf16 = __nv_bfloat16;

inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls fn with a value of the C++ type in which activations or weights are stored.
template <typename Fn>
void with_float(DType dtype, const Fn& fn) {
    if (dtype == DType::f32) return fn(float{});
    if (dtype == DType::bf16) return fn(bf16{});
    throw std::invalid_argument(std::string("no kernel for ") + name_of(dtype));
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// Where the rows of a tensor begin; a row is its last dimension. Rank 1 is one row, rank 3 has rows by two indices.
struct Rows {
    int64_t outer = 0, middle = 0;
    int inner = 1;

    __host__ __device__ int64_t operator[](int64_t row) const {
        if (inner == 1) return row * outer;
        return row / inner * outer + row % inner * middle;
    }
};

inline Rows rows_of(const Tensor& t) {
    if (t.rank <= 1) return {};
    if (t.rank == 2) return {t.stride[0], 0, 1};
    if (t.rank == 3) {
        // [T, H, C] whose heads lie one after the other needs no second index when rows are dense.
        if (t.stride[0] == t.shape[1] * t.stride[1]) return {t.stride[1], 0, 1};
        return {t.stride[0], t.stride[1], static_cast<int>(t.shape[1])};
    }
    throw std::invalid_argument("a tensor of more than three dimensions");
}

inline int64_t width_of(const Tensor& t) { return t.rank == 0 ? 1 : t.shape[t.rank - 1]; }

// Whether every row of the tensor can be read in packs of `size` elements.
inline bool packs(const Tensor& t, int size) {
    if (!t) return true;
    const Rows rows = rows_of(t);
    const auto bytes = static_cast<uintptr_t>(size) * size_of(t.dtype);
    return width_of(t) % size == 0 && rows.outer % size == 0 && rows.middle % size == 0 &&
           reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
}

// ---- packs of elements ---------------------------------------------------------------------------------------------

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __bfloat162float(x); }
template <typename T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
    return x;
}
template <>
__device__ inline bf16 narrow<bf16>(float x) {
    return __float2bfloat16_rn(x);
}

// kSize neighbours, moved in one access: kSize * sizeof(T) is 4, 8, 16 or 32 bytes (the last in two), or kSize is 1.
template <typename T, int kSize>
struct alignas(kSize * sizeof(T) > 16 ? 16 : kSize * sizeof(T)) Pack {
    T items[kSize];
};

template <int kSize, typename T>
__device__ void load(const T* from, float (&to)[kSize]) {
    const Pack<T, kSize> pack = *reinterpret_cast<const Pack<T, kSize>*>(from);
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = widen(pack.items[i]);
}

template <int kSize, typename T>
__device__ void store(T* to, const float (&from)[kSize]) {
    Pack<T, kSize> pack;
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.items[i] = narrow<T>(from[i]);
    *reinterpret_cast<Pack<T, kSize>*>(to) = pack;
}

// Calls fn with an integral constant: 8 where all tensors allow packs of 8 elements, else 1.
template <typename Fn, typename... Tensors>
void with_pack(const Fn& fn, const Tensors&... tensors) {
    if ((packs(tensors, 8) && ...)) return fn(std::integral_constant<int, 8>{});
    fn(std::integral_constant<int, 1>{});
}

// ---- sums ----------------------------------------------------------------------------------------------------------

template <typename T>
__device__ T warp_sum(T x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffU, x, lane);
    return x;
}

// The sum over a block of kThreads, the same bits in every thread.
template <int kThreads, typename T>
__device__ T block_sum(T x) {
    static_assert(kThreads % 32 == 0);
    x = warp_sum(x);
    if constexpr (kThreads == 32) return x;
    __shared__ T parts[kThreads / 32];
    __syncthreads();  // an earlier sum may still be read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    T all = parts[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) all += parts[warp];
    return all;
}

// In a block of 256 threads, the sum over those with the same place in their warp, for the first warp.
__device__ inline float lanes_sum(float x) {
    __shared__ float parts[8][32];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    parts[warp][lane] = x;
    __syncthreads();
    if (warp > 0) return 0.0F;
    float all = 0.0F;
#pragma unroll
    for (int w = 0; w < 8; ++w) all += parts[w][lane];
    return all;
}

// ---- elementwise ---------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;

// Blocks for `items` pieces of work, one a thread.
inline unsigned blocks_for(int64_t items) {
    const int64_t blocks = divide_up(items, kThreads);
    if (blocks > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
    return static_cast<unsigned>(blocks > 0 ? blocks : 1);
}

// Shape of an elementwise operation: dense tensors are one long row.
struct Plane {
    int64_t rows, width;
};

template <typename... Tensors>
Plane plane_of(const Tensor& first, const Tensors&... rest) {
    const bool dense = first.contiguous() && (rest.contiguous() && ...);
    return dense ? Plane{1, first.numel()} : Plane{first.rows(), width_of(first)};
}

// The tensor's rows in that plane.
inline Rows rows_in(const Plane& plane, const Tensor& t) { return plane.rows == 1 ? Rows{} : rows_of(t); }

inline bool packs_in(const Plane& plane, const Tensor& t, int size) {
    if (plane.rows > 1) return packs(t, size);
    const auto bytes = static_cast<uintptr_t>(size) * size_of(t.dtype);
    return plane.width % size == 0 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
}

}  // namespace surogate::cuda
