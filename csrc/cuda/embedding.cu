// embedding and its gradient (surogate/ops/embedding.py).
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

// A block a token. An id outside the table gives NaN, which stops the step: a kernel cannot raise.
template <typename W, typename T, int kSize>
__global__ void __launch_bounds__(128)
    gather(const W* table, int64_t table_row, int64_t vocabulary, const int32_t* ids, T* y, int64_t y_row, int width) {
    const int64_t token = blockIdx.x;
    const int64_t id = ids[token];
    const bool inside = id >= 0 && id < vocabulary;
    for (int c = static_cast<int>(threadIdx.x) * kSize; c < width; c += 128 * kSize) {
        float x[kSize];
        if (inside) {
            load<kSize>(table + id * table_row + c, x);
        } else {
#pragma unroll
            for (float& e : x) e = NAN;
        }
        store<kSize>(y + token * y_row + c, x);
    }
}

void embedding(const Call& call) {
    const Tensor &table = call.in[0], &ids = call.in[1], &y = call.out[0];
    const auto tokens = static_cast<unsigned>(ids.numel());
    with_float(table.dtype, [&](auto weight) {
        with_float(y.dtype, [&](auto kind) {
            with_pack(
                [&](auto size) {
                    gather<decltype(weight), decltype(kind), decltype(size)::value>
                        <<<tokens, 128, 0, stream_of(call)>>>(table.as<decltype(weight)>(), table.stride[0],
                                                              table.shape[0], ids.as<int32_t>(), y.as<decltype(kind)>(),
                                                              y.stride[0], static_cast<int>(width_of(y)));
                },
                table, y);
        });
    });
    check_launch("embedding");
}

constexpr int kIds = 256;  // ids that a block looks at together

// A block a token. The block of an id's first occurrence owns that row of the table's gradient and adds up the
// gradients of all its occurrences, in their order; the others leave at once.
template <typename T>
__global__ void __launch_bounds__(kIds) scatter(const T* dy, int64_t dy_row, const int32_t* ids, float* out,
                                                int64_t out_row, int64_t rows, int tokens, int width) {
    const int self = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
    const int32_t id = ids[self];
    if (id < 0 || id >= rows) return;
    int earlier = 0;
    for (int t = lane; t < self; t += kIds) earlier |= ids[t] == id;
    if (__syncthreads_or(earlier)) return;

    __shared__ int found[kIds];
    __shared__ int warps[kIds / 32];
    for (int base = self; base < tokens; base += kIds) {
        const int t = base + lane;
        const bool mine = t < tokens && ids[t] == id;
        const unsigned ballot = __ballot_sync(0xffffffffU, mine);
        if (lane % 32 == 0) warps[lane / 32] = __popc(ballot);
        __syncthreads();
        int before = 0, count = 0;
        for (int w = 0; w < kIds / 32; ++w) {
            if (w < lane / 32) before += warps[w];
            count += warps[w];
        }
        if (mine) found[before + __popc(ballot & ((1U << (lane % 32)) - 1))] = t;
        __syncthreads();
        if (count > 0) {
            for (int c = lane; c < width; c += kIds) {
                float sum = out[id * out_row + c];
                for (int i = 0; i < count; ++i) sum += widen(dy[found[i] * dy_row + c]);
                out[id * out_row + c] = sum;
            }
        }
        __syncthreads();
    }
}

void embedding_backward(const Call& call) {
    const Tensor &dy = call.in[0], &ids = call.in[1], &acc = call.in[2], &out = call.out[0];
    const int width = static_cast<int>(width_of(dy));
    if (!acc) {
        check(cudaMemset2DAsync(out.data, static_cast<size_t>(out.stride[0]) * 4, 0, static_cast<size_t>(width) * 4,
                                static_cast<size_t>(out.shape[0]), stream_of(call)),
              "embedding_backward");
    }
    with_float(dy.dtype, [&](auto kind) {
        scatter<<<static_cast<unsigned>(ids.numel()), kIds, 0, stream_of(call)>>>(
            dy.as<decltype(kind)>(), dy.stride[0], ids.as<int32_t>(), out.as<float>(), out.stride[0], out.shape[0],
            static_cast<int>(ids.numel()), width);
    });
    check_launch("embedding_backward");
}

SUROGATE_CUDA_KERNEL("embedding", embedding);
SUROGATE_CUDA_KERNEL("embedding_backward", embedding_backward);

}  // namespace

}  // namespace surogate::cuda
