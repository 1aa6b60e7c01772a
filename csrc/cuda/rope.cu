// rope_table and rope (surogate/ops/rope.py): the first half of a head turns against its second half.
#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

__global__ void __launch_bounds__(kThreads)
    table(const int32_t* positions, const float* frequencies, float* cosines, float* sines, int64_t cos_row,
          int64_t sin_row, uint32_t total, Divider half, double scale) {
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= total) return;
    const uint32_t token = half.quotient(i), column = i - token * half.divisor();
    // In f64: in f32 the angle of position 100 000 is off by up to 4e-3.
    double s, c;
    sincos(static_cast<double>(positions[token]) * static_cast<double>(frequencies[column]), &s, &c);
    cosines[token * cos_row + column] = static_cast<float>(c * scale);
    sines[token * sin_row + column] = static_cast<float>(s * scale);
}

void rope_table(const Call& call) {
    const Tensor &positions = call.in[0], &frequencies = call.in[1], &cosines = call.out[0], &sines = call.out[1];
    const int64_t total = cosines.numel();
    if (total == 0) return;
    if (total > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
    table<<<blocks_for(total), kThreads, 0, stream_of(call)>>>(
        positions.as<int32_t>(), frequencies.as<float>(), cosines.as<float>(), sines.as<float>(), cosines.stride[0],
        sines.stride[0], static_cast<uint32_t>(total), Divider(width_of(cosines)), call.attrs.real("scale", 1.0));
    check_launch("rope_table");
}

// Heads that a thread turns by the angles that it has read.
constexpr int kHeads = 4;

struct Rotation {
    const void* x;
    void* y;
    const float *cosines, *sines;
    int64_t x_token, x_head, y_token, y_head, cos_row, sin_row;  // strides
    uint32_t total;                                              // threads with work
    Divider packs, groups;                                       // of a half of a head; of the heads of a token
    int heads;
    float sign;
};

// A thread kHeads heads' pack of the first half and its counterpart in the second. y may be x: every element is read
// and written by one thread.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) rotate(Rotation r) {
    using P = Pack<T, kSize>;
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= r.total) return;
    const uint32_t place = r.packs.quotient(i), token = r.groups.quotient(place);
    const int column = static_cast<int>(i - place * r.packs.divisor()) * kSize;
    const int half = static_cast<int>(r.packs.divisor()) * kSize;
    const int head = static_cast<int>(place - token * r.groups.divisor()) * kHeads;
    const T* x = static_cast<const T*>(r.x) + token * r.x_token + head * r.x_head + column;
    T* y = static_cast<T*>(r.y) + token * r.y_token + head * r.y_head + column;
    const auto cosine = Pack<float, kSize>::at(r.cosines + token * r.cos_row + column);
    const auto sine = Pack<float, kSize>::at(r.sines + token * r.sin_row + column);
    P first[kHeads], second[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        if (head + h < r.heads) first[h] = P::at(x + h * r.x_head), second[h] = P::at(x + h * r.x_head + half);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        if (head + h >= r.heads) return;
        P turned_first, turned_second;
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
            const float a = first[h][e], b = second[h][e], s = r.sign * sine[e];
            turned_first.set(e, a * cosine[e] - b * s);
            turned_second.set(e, b * cosine[e] + a * s);
        }
        turned_first.put(y + h * r.y_head);
        turned_second.put(y + h * r.y_head + half);
    }
}

void rope(const Call& call) {
    const Tensor &x = call.in[0], &cosines = call.in[1], &sines = call.in[2], &y = call.out[0];
    expect_dtype(y, x.dtype, "y");
    const int64_t half = x.shape[2] / 2;
    const bool packed = half % kPack == 0 && packs(x) && packs(y) && packs(cosines) && packs(sines);
    const int64_t row_packs = packed ? half / kPack : half, groups = divide_up(x.shape[1], kHeads);
    const int64_t total = x.shape[0] * groups * row_packs;
    if (total == 0) return;
    if (total > INT32_MAX) throw std::invalid_argument("a tensor is too large for one launch");
    const Rotation r{.x = x.data,
                     .y = y.data,
                     .cosines = cosines.as<float>(),
                     .sines = sines.as<float>(),
                     .x_token = x.stride[0],
                     .x_head = x.stride[1],
                     .y_token = y.stride[0],
                     .y_head = y.stride[1],
                     .cos_row = cosines.stride[0],
                     .sin_row = sines.stride[0],
                     .total = static_cast<uint32_t>(total),
                     .packs = Divider(row_packs),
                     .groups = Divider(groups),
                     .heads = static_cast<int>(x.shape[1]),
                     .sign = call.attrs.flag("inverse") ? -1.0F : 1.0F};
    const unsigned blocks = blocks_for(total);
    with_float(x.dtype, [&](auto kind) {
        using T = decltype(kind);
        if (packed) {
            rotate<T, kPack><<<blocks, kThreads, 0, stream_of(call)>>>(r);
        } else {
            rotate<T, 1><<<blocks, kThreads, 0, stream_of(call)>>>(r);
        }
    });
    check_launch("rope");
}

SUROGATE_CUDA_KERNEL("rope_table", rope_table);
SUROGATE_CUDA_KERNEL("rope", rope);

}  // namespace

}  // namespace surogate::cuda
