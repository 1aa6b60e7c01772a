// What our kernels share: rows of strided tensors, sixteen-byte accesses, sums in a fixed order, launches.
//
// Storage is f32 or bf16, arithmetic is f32. Nothing here or in the kernels adds floats with atomics, so results are
// the same bits every time. Every kernel has two forms: one that moves packs of neighbours, and one element by element
// for widths, strides or addresses that do not allow packs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/kernel.h"
#include "cuda/plugin.h"

namespace surogate::cuda {

using bf16 = __nv_bfloat16;

inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads of a block, where nothing else is said.
constexpr int kThreads = 256;

// Blocks for `items` pieces of work, `each` of them a block.
inline unsigned blocks_for(int64_t items, int64_t each = kThreads) {
    const int64_t blocks = divide_up(items, each);
    if (blocks > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
    return static_cast<unsigned>(blocks);
}

// Calls fn with a value of the C++ type in which activations or weights are stored.
template <typename Fn>
void with_float(DType dtype, const Fn& fn) {
    if (dtype == DType::f32) return fn(float{});
    if (dtype == DType::bf16) return fn(bf16{});
    throw std::invalid_argument(std::string("no kernel for ") + name_of(dtype));
}

inline void expect_dtype(const Tensor& t, DType dtype, const char* what) {
    if (t && t.dtype != dtype) throw std::invalid_argument(std::string(what) + " is " + name_of(t.dtype));
}

// The call's workspace as `count` values. `Op.workspace_cuda` planned it: less is a fault of this program.
template <typename T>
T* workspace_of(const Call& call, int64_t count) {
    if (!call.workspace || call.workspace.numel() < count * static_cast<int64_t>(sizeof(T))) {
        throw std::logic_error("the workspace is smaller than its kernel needs");
    }
    return call.workspace.as<T>();
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// Division of numbers below 2^31 by a number that is known at launch: a multiplication and a shift (Granlund and
// Montgomery 1994).
class Divider {
   public:
    Divider() = default;
    explicit Divider(int64_t divisor) {
        if (divisor < 1 || divisor > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
        divisor_ = static_cast<uint32_t>(divisor);
        while ((uint64_t{1} << shift_) < divisor_) ++shift_;
        multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - divisor_) << 32) / divisor_ + 1);
    }
    __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, multiplier_) + n) >> shift_; }
    __host__ __device__ uint32_t divisor() const { return divisor_; }

   private:
    uint32_t divisor_ = 1, multiplier_ = 1, shift_ = 0;
};

// Where the rows of a tensor begin, in elements; rows count over all dimensions but the last.
class Rows {
   public:
    Rows() = default;
    // `inner`: trailing dimensions that belong to a row; with 0 a row is one element.
    explicit Rows(const Tensor& t, int inner = 1) {
        if (!t) return;
        int64_t size[kMaxRank] = {}, stride[kMaxRank] = {};
        int kept = 0;
        for (int i = 0; i < t.rank - inner; ++i) {  // merge dimensions that one stride covers, drop those of size 1
            if (t.shape[i] == 1) continue;
            if (kept > 0 && stride[kept - 1] == t.stride[i] * t.shape[i]) {
                size[kept - 1] *= t.shape[i];
                stride[kept - 1] = t.stride[i];
            } else {
                size[kept] = t.shape[i];
                stride[kept++] = t.stride[i];
            }
        }
        if (kept > 2) throw std::invalid_argument("rows of a tensor that three strides describe");
        if (kept > 0) outer_ = stride[0];
        if (kept > 1) middle_ = stride[1], divider_ = Divider(size[1]);
    }

    __device__ int64_t operator[](uint32_t row) const {
        const uint32_t i = divider_.quotient(row);
        return i * outer_ + (row - i * divider_.divisor()) * middle_;
    }
    // Whether every row begins at a multiple of `size` elements from the first.
    bool multiples_of(int64_t size) const { return outer_ % size == 0 && middle_ % size == 0; }
    // Whether all rows are equally far apart, and how far.
    bool even() const { return divider_.divisor() == 1; }
    int64_t distance() const { return outer_; }

   private:
    int64_t outer_ = 0, middle_ = 0;
    Divider divider_;
};

inline int64_t width_of(const Tensor& t) { return t.rank == 0 ? 1 : t.shape[t.rank - 1]; }

// The number of rows, which our kernels count in 31 bits.
inline uint32_t rows_in(const Tensor& t) {
    const int64_t rows = t.rows();
    if (rows > INT32_MAX) throw std::invalid_argument("a tensor has too many rows for one launch");
    return static_cast<uint32_t>(rows);
}
inline int width_in(const Tensor& t) {
    const int64_t width = width_of(t);
    if (width > (1 << 30)) throw std::invalid_argument("a tensor has too long rows for one launch");
    return static_cast<int>(width);
}

// ---- packs ---------------------------------------------------------------------------------------------------------

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __bfloat162float(x); }
template <typename T>
__device__ T narrow(float x) {
    if constexpr (std::is_same_v<T, bf16>) {
        return __float2bfloat16_rn(x);
    } else {
        return x;
    }
}

// f64 to bf16, to nearest, ties to even. By way of f32 rounded to odd, so that what lay just beside a tie is not taken
// for one.
__host__ __device__ inline bf16 narrow_double(double x) {
    union {
        float value;
        uint32_t bits;
    } nearest{static_cast<float>(x)};
    if (static_cast<double>(nearest.value) != x) {
        if (fabs(static_cast<double>(nearest.value)) > fabs(x)) --nearest.bits;  // towards zero
        nearest.bits |= 1U;
    }
    return __float2bfloat16_rn(nearest.value);
}

// kSize neighbours, moved by as few accesses of at most 16 bytes as they take.
template <typename T, int kSize>
struct alignas(kSize * sizeof(T) > 16 ? 16 : kSize * sizeof(T)) Pack {
    T items[kSize];

    __device__ static Pack at(const T* from) { return *reinterpret_cast<const Pack*>(from); }
    __device__ void put(T* to) const { *reinterpret_cast<Pack*>(to) = *this; }
    __device__ float operator[](int i) const { return widen(items[i]); }
    __device__ void set(int i, float x) { items[i] = narrow<T>(x); }
};

// Eight elements: 16 bytes of bf16.
constexpr int kPack = 8;

inline bool aligned(const void* data, int64_t elements, DType dtype) {
    const auto bytes = static_cast<uintptr_t>(elements) * size_of(dtype);
    return reinterpret_cast<uintptr_t>(data) % (bytes < 16 ? bytes : 16) == 0;
}

// Whether the tensor's rows can be moved in packs of `size` elements. An operand that was left out can.
inline bool packs(const Tensor& t, int size = kPack) {
    return !t || (width_of(t) % size == 0 && Rows(t).multiples_of(size) && aligned(t.data, size, t.dtype));
}

// Weights, whose dtype need not be that of the activations: eight from `at` on, or one.
struct Weights {
    const void* data;
    bool narrow;

    explicit Weights(const Tensor& w) : data(w.data), narrow(w.dtype == DType::bf16) {
        if (!narrow) expect_dtype(w, DType::f32, "a weight");
    }
    template <int kSize>
    __device__ void load(int at, float (&to)[kSize]) const {
        if (narrow) {
            const auto pack = Pack<bf16, kSize>::at(static_cast<const bf16*>(data) + at);
#pragma unroll
            for (int i = 0; i < kSize; ++i) to[i] = pack[i];
        } else {
            const auto pack = Pack<float, kSize>::at(static_cast<const float*>(data) + at);
#pragma unroll
            for (int i = 0; i < kSize; ++i) to[i] = pack[i];
        }
    }
};

// ---- elementwise ---------------------------------------------------------------------------------------------------

// How tensors of one shape are walked together: in packs of `size` neighbours (kPack or 1), which are counted over all
// rows. Where all are dense they are one row.
struct Walk {
    bool dense = true;
    int size = 1;
    int64_t packs = 0;  // below 2^31 unless dense
    Divider row_packs;

    template <typename... Tensors>
    explicit Walk(const Tensor& first, const Tensors&... rest) {
        auto all = [&](auto holds) { return holds(first) && (holds(rest) && ...); };
        const int64_t count = first.numel();
        dense = all([](const Tensor& t) { return !t || t.contiguous(); });
        const bool packed = all([&](const Tensor& t) {
            return dense ? count % kPack == 0 && aligned(t.data, kPack, t.dtype) : surogate::cuda::packs(t);
        });
        if (packed) size = kPack;
        packs = count / size;
        if (dense || count == 0) return;
        if (packs > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
        row_packs = Divider(width_of(first) / size);
    }
    // The tensor's rows in this walk.
    Rows rows(const Tensor& t) const { return dense ? Rows() : Rows(t); }
};

// Where a pack is: its row, and its first element in that row.
struct Place {
    uint32_t row = 0;
    int64_t column = 0;

    Place() = default;
    __device__ Place(const Walk& walk, int64_t pack, int size) : column(pack * size) {
        if (walk.dense) return;
        row = walk.row_packs.quotient(static_cast<uint32_t>(pack));
        column = (pack - int64_t{row} * walk.row_packs.divisor()) * size;
    }
    __device__ int64_t in(const Rows& rows) const { return rows[row] + column; }
};

// ---- sums ----------------------------------------------------------------------------------------------------------

// The sum over groups of kGroup neighbouring threads, the same bits in every thread of a group; kGroup is a power of
// two that divides the block. All threads of the block must call.
template <int kGroup, typename T>
__device__ T group_sum(T x) {
    constexpr int kWarp = 32, kMostWarps = 32;
#pragma unroll
    for (int lane = (kGroup < kWarp ? kGroup : kWarp) / 2; lane > 0; lane /= 2) {
        x += __shfl_xor_sync(0xffffffffU, x, lane);
    }
    if constexpr (kGroup > kWarp) {
        __shared__ T parts[kMostWarps];
        const int warp = static_cast<int>(threadIdx.x) / kWarp, first = warp & ~(kGroup / kWarp - 1);
        __syncthreads();  // an earlier sum may still be read
        if (threadIdx.x % kWarp == 0) parts[warp] = x;
        __syncthreads();
        x = parts[first];
#pragma unroll
        for (int w = 1; w < kGroup / kWarp; ++w) x += parts[first + w];
    }
    return x;
}

// Sums over rows go in two steps: tiles of rows into partial[tiles, width], then this, over the tiles in order:
// out[width] = acc + sum. `acc` may be null. Defined in reduce.cu.
void sum_partials(const float* partial, int tiles, int width, const Tensor& acc, const Tensor& out,
                  cudaStream_t stream);

}  // namespace surogate::cuda
