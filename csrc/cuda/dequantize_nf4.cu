// dequantize_nf4 (surogate/ops/dequantize_nf4.py): one pass over memory, sixteen weights (eight bytes of codes) a
// thread. The sixteen numbers lie in as many banks of shared memory, so lookups do not wait for one another.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

constexpr int kGroup = 256;  // magnitudes that share one, where they are quantised themselves
constexpr int kWide = 16;

struct Source {
    const uint8_t *codes, *index;
    const float *absmax, *groups, *offset, *table, *numbers;
    void* y;
    Rows rows;
    Divider columns;  // packs of a row
    int64_t packs;
    uint32_t first;
    int block;

    __device__ float magnitude(int64_t of_block) const {
        if (absmax != nullptr) return absmax[of_block];
        // Rounded before the sum, as bitsandbytes does.
        return __fadd_rn(__fmul_rn(table[index[of_block]], groups[of_block / kGroup]), *offset);
    }
};

template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) dequantize(Source s) {
    __shared__ float numbers[16];
    if (threadIdx.x < 16) numbers[threadIdx.x] = s.numbers[threadIdx.x];
    __syncthreads();
    const int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (pack >= s.packs) return;
    const uint32_t row = s.columns.quotient(static_cast<uint32_t>(pack));
    const int64_t column = (pack - int64_t{row} * s.columns.divisor()) * kSize;
    const int64_t at = pack * kSize;
    const float scale = s.magnitude(at / s.block);
    T* y = static_cast<T*>(s.y) + s.rows[row + s.first] + column;
    if constexpr (kSize == 1) {
        const unsigned byte = s.codes[at / 2];
        *y = narrow<T>(__fmul_rn(numbers[at % 2 == 0 ? byte >> 4 : byte & 15U], scale));
    } else {
        const auto codes = Pack<uint8_t, kSize / 2>::at(s.codes + at / 2);
        Pack<T, kSize> out;
#pragma unroll
        for (int i = 0; i < kSize / 2; ++i) {
            const unsigned byte = codes.items[i];
            out.set(2 * i, __fmul_rn(numbers[byte >> 4], scale));
            out.set(2 * i + 1, __fmul_rn(numbers[byte & 15U], scale));
        }
        out.put(y);
    }
}

void dequantize_nf4(const Call& call) {
    const Tensor &codes = call.in[0], &absmax = call.in[1], &y = call.out[0];
    const int64_t weights = 2 * codes.numel(), width = y.dim(1);
    if (weights == 0) return;
    const bool nested = absmax.dtype == DType::u8;
    Source s{};
    s.codes = codes.as<uint8_t>(), s.index = absmax.as<uint8_t>();
    s.absmax = nested ? nullptr : absmax.as<float>(), s.groups = call.in[2].as<float>();
    s.offset = call.in[3].as<float>(), s.table = call.in[4].as<float>(), s.numbers = call.in[5].as<float>();
    s.y = y.data, s.rows = Rows(y), s.first = static_cast<uint32_t>(call.attrs.integer("first"));
    s.block = static_cast<int>(call.attrs.integer("block"));
    const bool wide = packs(y, kWide) && s.block % kWide == 0 && aligned(s.codes, kWide / 2, DType::u8);
    const int size = wide ? kWide : 1;
    s.columns = Divider(width / size), s.packs = weights / size;
    if (s.packs > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
    with_float(y.dtype, [&](auto kind) {
        using T = decltype(kind);
        if (wide) {
            dequantize<T, kWide><<<blocks_for(s.packs), kThreads, 0, stream_of(call)>>>(s);
        } else {
            dequantize<T, 1><<<blocks_for(s.packs), kThreads, 0, stream_of(call)>>>(s);
        }
    });
    check_launch("dequantize_nf4");
}

SUROGATE_CUDA_KERNEL("dequantize_nf4", dequantize_nf4);

}  // namespace

}  // namespace surogate::cuda
