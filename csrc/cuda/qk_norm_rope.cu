// qk_norm_rope and its backward pass (surogate/ops/qk_norm_rope.py). A group of threads has a head, each thread a pack
// of its first half and the pack of the second half against which that turns: norm, rotation and both ways back stay in
// registers, and q and k are read and written once. The first blocks of a launch work on q, the others on k.
#include <algorithm>

#include "cuda/common.cuh"

namespace surogate::cuda {

namespace {

constexpr int kMostDim = 256;  // MOST_DIM in surogate/ops/qk_norm_rope.py
constexpr int kTiles = 512;    // partial weight gradients of q and of k, at most (_TILES_CUDA there)

// kLanes threads a head, each with kSteps packs of kSize of either half; kHeads heads of a token a group, so that a
// thread has several loads in flight and uses its angles again.
template <typename T, int kSizeOf, int kLanesOf, int kStepsOf, int kHeadsOf>
struct Shape {
    using Element = T;
    using P = Pack<T, kSizeOf>;
    using Angles = Pack<float, kSizeOf>;
    static constexpr int kSize = kSizeOf, kLanes = kLanesOf, kSteps = kStepsOf, kHeads = kHeadsOf;
    static constexpr int kGroups = kThreads / kLanes;  // of a block
    static constexpr int kStep = kLanes * kSize;       // elements from a thread's pack to its next one
};

template <typename T, typename Fn>
void with_shape(int half, bool packed, const Fn& fn) {
    if (!packed) return fn(Shape<T, 1, 32, kMostDim / 64, 1>{});
    const int count = half / kPack;
    if (count <= 2) return fn(Shape<T, kPack, 2, 1, 2>{});
    if (count <= 4) return fn(Shape<T, kPack, 4, 1, 2>{});
    if (count <= 8) return fn(Shape<T, kPack, 8, 1, 2>{});
    fn(Shape<T, kPack, 16, 1, 2>{});
}

// q or k: x before the norm; y the result, or dx; dy what comes back.
struct Part {
    const void *x, *dy;
    void* y;
    float* partial;  // [blocks, 2 * half]; null: the weight's gradient is not wanted
    int64_t x_token, x_head, dy_token, dy_head, y_token, y_head;
    const void* w;
    bool narrow;
    int heads;
    Divider places;           // groups that a token takes
    uint32_t groups, blocks;  // in all
};

struct Both {
    Part q, k;
    const float *cosines, *sines;
    int64_t cos_row, sin_row;
    int half;
    float inverse, eps;  // 1 / (2 * half)
};

// Where a group is, and what its threads have.
template <typename S>
struct Work {
    bool inside[S::kHeads];  // heads beyond the last take part in sums alone
    int64_t x, y, dy;        // offsets of the first head's row
    uint32_t token;

    __device__ Work(const Part& p, uint32_t group) {
        const bool any = group < p.groups;
        token = any ? p.places.quotient(group) : 0;
        const int head = any ? static_cast<int>(group - token * p.places.divisor()) * S::kHeads : 0;
#pragma unroll
        for (int h = 0; h < S::kHeads; ++h) inside[h] = any && head + h < p.heads;
        x = token * p.x_token + head * p.x_head;
        y = token * p.y_token + head * p.y_head;
        dy = token * p.dy_token + head * p.dy_head;
    }
};

template <int kSize>
__device__ void load_weights(const Part& p, int at, float (&to)[kSize]) {
    if (p.narrow) {
        const auto pack = Pack<bf16, kSize>::at(static_cast<const bf16*>(p.w) + at);
#pragma unroll
        for (int e = 0; e < kSize; ++e) to[e] = pack[e];
    } else {
        const auto pack = Pack<float, kSize>::at(static_cast<const float*>(p.w) + at);
#pragma unroll
        for (int e = 0; e < kSize; ++e) to[e] = pack[e];
    }
}

// A group's heads as packs of the first and second half.
template <typename S>
struct Heads {
    typename S::P first[S::kHeads][S::kSteps], second[S::kHeads][S::kSteps];

    __device__ void read(const void* from, int64_t offset, int64_t head, const bool (&inside)[S::kHeads], int lane,
                         int half) {
        const auto* x = static_cast<const typename S::Element*>(from) + offset;
#pragma unroll
        for (int h = 0; h < S::kHeads; ++h) {
#pragma unroll
            for (int s = 0; s < S::kSteps; ++s) {
                const int c = lane * S::kSize + s * S::kStep;
                if (inside[h] && c < half) {
                    first[h][s] = S::P::at(x + h * head + c);
                    second[h][s] = S::P::at(x + h * head + half + c);
                } else {
#pragma unroll
                    for (int e = 0; e < S::kSize; ++e) first[h][s].set(e, 0.0F), second[h][s].set(e, 0.0F);
                }
            }
        }
    }
};

template <typename S>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ Both f) {
    using T = typename S::Element;
    const bool keys = blockIdx.x >= f.q.blocks;
    const Part& p = keys ? f.k : f.q;
    const uint32_t block = keys ? blockIdx.x - f.q.blocks : blockIdx.x;
    const int lane = static_cast<int>(threadIdx.x) % S::kLanes, half = f.half;
    const Work<S> work(p, block * S::kGroups + threadIdx.x / S::kLanes);
    Heads<S> x;
    x.read(p.x, work.x, p.x_head, work.inside, lane, half);
    float rstd[S::kHeads];
#pragma unroll
    for (int h = 0; h < S::kHeads; ++h) {
        float sum = 0.0F;
#pragma unroll
        for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
            for (int e = 0; e < S::kSize; ++e) {
                sum += x.first[h][s][e] * x.first[h][s][e] + x.second[h][s][e] * x.second[h][s][e];
            }
        }
        rstd[h] = rsqrtf(group_sum<S::kLanes>(sum) * f.inverse + f.eps);
    }
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
        const int c = lane * S::kSize + s * S::kStep;
        if (c >= half) break;
        const auto cosine = S::Angles::at(f.cosines + work.token * f.cos_row + c);
        const auto sine = S::Angles::at(f.sines + work.token * f.sin_row + c);
        float w1[S::kSize], w2[S::kSize];
        load_weights(p, c, w1);
        load_weights(p, half + c, w2);
#pragma unroll
        for (int h = 0; h < S::kHeads; ++h) {
            if (!work.inside[h]) continue;
            typename S::P y1, y2;
#pragma unroll
            for (int e = 0; e < S::kSize; ++e) {
                const float a = x.first[h][s][e] * rstd[h] * w1[e], b = x.second[h][s][e] * rstd[h] * w2[e];
                y1.set(e, a * cosine[e] - b * sine[e]);
                y2.set(e, b * cosine[e] + a * sine[e]);
            }
            T* y = static_cast<T*>(p.y) + work.y + h * p.y_head + c;
            y1.put(y);
            y2.put(y + half);
        }
    }
}

// dx, and the weight's gradient if kWeight: then a block goes on to every p.blocks-th piece of its part and leaves one
// partial sum. dx may be dy.
template <typename S, bool kWeight>
__global__ void __launch_bounds__(kThreads, 2) backward(const __grid_constant__ Both f) {
    using T = typename S::Element;
    const bool keys = blockIdx.x >= f.q.blocks;
    const Part& p = keys ? f.k : f.q;
    const uint32_t block = keys ? blockIdx.x - f.q.blocks : blockIdx.x;
    const int lane = static_cast<int>(threadIdx.x) % S::kLanes, half = f.half;
    float dw1[S::kSteps][S::kSize] = {}, dw2[S::kSteps][S::kSize] = {};
    // By the block's first group, so that all its threads take part in every sum.
    for (uint32_t first = block * S::kGroups; first < p.groups; first += p.blocks * S::kGroups) {
        const Work<S> work(p, first + threadIdx.x / S::kLanes);
        Heads<S> x, dy;
        x.read(p.x, work.x, p.x_head, work.inside, lane, half);
        dy.read(p.dy, work.dy, p.dy_head, work.inside, lane, half);
        float squares[S::kHeads] = {}, along[S::kHeads] = {};
#pragma unroll
        for (int s = 0; s < S::kSteps; ++s) {
            const int c = lane * S::kSize + s * S::kStep;
            if (c >= half) break;
            const auto cosine = S::Angles::at(f.cosines + work.token * f.cos_row + c);
            const auto sine = S::Angles::at(f.sines + work.token * f.sin_row + c);
            float w1[S::kSize], w2[S::kSize];
            load_weights(p, c, w1);
            load_weights(p, half + c, w2);
#pragma unroll
            for (int h = 0; h < S::kHeads; ++h) {
#pragma unroll
                for (int e = 0; e < S::kSize; ++e) {
                    const float a = x.first[h][s][e], b = x.second[h][s][e];
                    const float g1 = dy.first[h][s][e] * cosine[e] + dy.second[h][s][e] * sine[e];
                    const float g2 = dy.second[h][s][e] * cosine[e] - dy.first[h][s][e] * sine[e];
                    squares[h] += a * a + b * b;
                    along[h] += g1 * w1[e] * a + g2 * w2[e] * b;
                }
            }
        }
        float rstd[S::kHeads];
#pragma unroll
        for (int h = 0; h < S::kHeads; ++h) {
            rstd[h] = rsqrtf(group_sum<S::kLanes>(squares[h]) * f.inverse + f.eps);
            along[h] = rstd[h] * rstd[h] * rstd[h] * group_sum<S::kLanes>(along[h]) * f.inverse;
        }
        // The angles and weights are read again, from the first cache: registers are scarcer than that.
#pragma unroll
        for (int s = 0; s < S::kSteps; ++s) {
            const int c = lane * S::kSize + s * S::kStep;
            if (c >= half) break;
            const auto cosine = S::Angles::at(f.cosines + work.token * f.cos_row + c);
            const auto sine = S::Angles::at(f.sines + work.token * f.sin_row + c);
            float w1[S::kSize], w2[S::kSize];
            load_weights(p, c, w1);
            load_weights(p, half + c, w2);
#pragma unroll
            for (int h = 0; h < S::kHeads; ++h) {
                if (!work.inside[h]) continue;
                typename S::P dx1, dx2;
#pragma unroll
                for (int e = 0; e < S::kSize; ++e) {
                    const float a = x.first[h][s][e], b = x.second[h][s][e];
                    const float g1 = dy.first[h][s][e] * cosine[e] + dy.second[h][s][e] * sine[e];
                    const float g2 = dy.second[h][s][e] * cosine[e] - dy.first[h][s][e] * sine[e];
                    if constexpr (kWeight) {
                        dw1[s][e] += g1 * (a * rstd[h]);
                        dw2[s][e] += g2 * (b * rstd[h]);
                    }
                    dx1.set(e, rstd[h] * g1 * w1[e] - along[h] * a);
                    dx2.set(e, rstd[h] * g2 * w2[e] - along[h] * b);
                }
                if (p.y == nullptr) continue;
                T* y = static_cast<T*>(p.y) + work.y + h * p.y_head + c;
                dx1.put(y);
                dx2.put(y + half);
            }
        }
    }
    if constexpr (kWeight) {
        // The groups in order, column by column.
        __shared__ float sums[kThreads][2 * S::kSteps * S::kSize + 1];
#pragma unroll
        for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
            for (int e = 0; e < S::kSize; ++e) {
                sums[threadIdx.x][s * S::kSize + e] = dw1[s][e];
                sums[threadIdx.x][(S::kSteps + s) * S::kSize + e] = dw2[s][e];
            }
        }
        __syncthreads();
        float* to = p.partial + static_cast<int64_t>(block) * (2 * half);
        for (int column = static_cast<int>(threadIdx.x); column < 2 * half; column += kThreads) {
            const int c = column < half ? column : column - half, step = c / S::kStep, left = c - step * S::kStep;
            const int place = ((column < half ? 0 : S::kSteps) + step) * S::kSize + left % S::kSize;
            float sum = 0.0F;
            for (int group = 0; group < S::kGroups; ++group) {
                sum += sums[group * S::kLanes + left / S::kSize][place];
            }
            to[column] = sum;
        }
    }
}

struct Sum {
    const float *partial, *acc;
    float* out;
    int tiles;
};
struct Sums {
    Sum q, k;
};

// out = acc + the partial sums in order; a block 32 columns of the gradient of wq, or (grid.y) of wk.
__global__ void __launch_bounds__(1024) add_partials(const __grid_constant__ Sums both, int width) {
    constexpr int kWarp = 32;
    __shared__ float sums[kWarp][kWarp + 1];
    const Sum& one = blockIdx.y == 0 ? both.q : both.k;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int column = static_cast<int>(blockIdx.x) * kWarp + lane;
    float sum = 0.0F;
    if (column < width) {
#pragma unroll 8
        for (int tile = warp; tile < one.tiles; tile += kWarp) sum += one.partial[int64_t{tile} * width + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= width) return;
    sum = 0.0F;
#pragma unroll
    for (int w = 0; w < kWarp; ++w) sum += sums[w][lane];
    one.out[column] = one.acc != nullptr ? one.acc[column] + sum : sum;
}

// The first `count` operands are all of one dtype and movable in packs.
bool packed(const Call& call, std::initializer_list<const Tensor*> tensors) {
    return call.in[0].shape[2] % (2 * kPack) == 0 &&
           std::all_of(tensors.begin(), tensors.end(), [](const Tensor* t) { return packs(*t); });
}

Part part_of(const Tensor& x, const Tensor& dy, const Tensor& y, const Tensor& w) {
    if (w.dtype != DType::bf16) expect_dtype(w, DType::f32, "a weight");
    expect_dtype(dy, x.dtype, "a gradient");
    expect_dtype(y, x.dtype, "a result");
    return {.x = x.data,
            .dy = dy.data,
            .y = y.data,
            .partial = nullptr,
            .x_token = x.stride[0],
            .x_head = x.stride[1],
            .dy_token = dy.stride[0],
            .dy_head = dy.stride[1],
            .y_token = y.stride[0],
            .y_head = y.stride[1],
            .w = w.data,
            .narrow = w.dtype == DType::bf16,
            .heads = static_cast<int>(x.shape[1]),
            .places = {},
            .groups = 0,
            .blocks = 0};
}

// Shares the part out over blocks, at most `most` of them.
template <typename S>
void share_out(Part& p, int64_t tokens, int64_t most) {
    const int64_t places = divide_up(p.heads, S::kHeads);
    if (tokens * places > INT32_MAX) throw std::invalid_argument("q or k is too large for one launch");
    p.places = Divider(places);
    p.groups = static_cast<uint32_t>(tokens * places);
    p.blocks = static_cast<uint32_t>(std::min(divide_up(p.groups, S::kGroups), most));
}

Both both_of(const Part& q, const Part& k, const Tensor& cosines, const Tensor& sines, int64_t dim, double eps) {
    if (dim > kMostDim) throw std::invalid_argument("heads of more than 256");
    return {.q = q,
            .k = k,
            .cosines = cosines.as<float>(),
            .sines = sines.as<float>(),
            .cos_row = cosines.stride[0],
            .sin_row = sines.stride[0],
            .half = static_cast<int>(dim / 2),
            .inverse = 1.0F / static_cast<float>(dim),
            .eps = static_cast<float>(eps)};
}

void qk_norm_rope(const Call& call) {
    const Tensor &q = call.in[0], &k = call.in[1], &wq = call.in[2], &wk = call.in[3];
    const Tensor &cosines = call.in[4], &sines = call.in[5], &q_out = call.out[0], &k_out = call.out[1];
    expect_dtype(k, q.dtype, "k");
    Both f = both_of(part_of(q, {}, q_out, wq), part_of(k, {}, k_out, wk), cosines, sines, q.shape[2],
                     call.attrs.real("eps"));
    const bool in_packs = packed(call, {&q, &k, &wq, &wk, &cosines, &sines, &q_out, &k_out});
    if (q.shape[0] == 0) return;
    with_float(q.dtype, [&](auto kind) {
        with_shape<decltype(kind)>(f.half, in_packs, [&](auto shape) {
            using S = decltype(shape);
            share_out<S>(f.q, q.shape[0], INT32_MAX / 2);
            share_out<S>(f.k, k.shape[0], INT32_MAX / 2);
            forward<S><<<f.q.blocks + f.k.blocks, kThreads, 0, stream_of(call)>>>(f);
        });
    });
    check_launch("qk_norm_rope");
}

void qk_norm_rope_backward(const Call& call) {
    const Tensor &dq = call.in[0], &dk = call.in[1], &q = call.in[2], &k = call.in[3];
    const Tensor &wq = call.in[4], &wk = call.in[5], &cosines = call.in[6], &sines = call.in[7];
    const Tensor &acc_q = call.in[8], &acc_k = call.in[9];
    const Tensor &dq_out = call.out[0], &dk_out = call.out[1], &dwq = call.out[2], &dwk = call.out[3];
    expect_dtype(k, q.dtype, "k");
    const int64_t dim = q.shape[2];
    Both f =
        both_of(part_of(q, dq, dq_out, wq), part_of(k, dk, dk_out, wk), cosines, sines, dim, call.attrs.real("eps"));
    const bool in_packs = packed(call, {&dq, &dk, &q, &k, &wq, &wk, &cosines, &sines, &dq_out, &dk_out});
    if (dwq) {
        f.q.partial = workspace_of<float>(call, int64_t{2} * kTiles * dim);
        f.k.partial = f.q.partial + int64_t{kTiles} * dim;
    }
    if (q.shape[0] > 0) {
        with_float(q.dtype, [&](auto kind) {
            with_shape<decltype(kind)>(f.half, in_packs, [&](auto shape) {
                using S = decltype(shape);
                const int64_t most = dwq ? kTiles : INT32_MAX / 2;
                share_out<S>(f.q, q.shape[0], most);
                share_out<S>(f.k, k.shape[0], most);
                if (dwq) {
                    backward<S, true><<<f.q.blocks + f.k.blocks, kThreads, 0, stream_of(call)>>>(f);
                } else {
                    backward<S, false><<<f.q.blocks + f.k.blocks, kThreads, 0, stream_of(call)>>>(f);
                }
            });
        });
        check_launch("qk_norm_rope_backward");
    }
    if (!dwq) return;
    const Sums sums{{f.q.partial, acc_q.as<float>(), dwq.as<float>(), static_cast<int>(f.q.blocks)},
                    {f.k.partial, acc_k.as<float>(), dwk.as<float>(), static_cast<int>(f.k.blocks)}};
    const auto width = static_cast<int>(dim);
    add_partials<<<dim3(blocks_for(width, 32), 2), 1024, 0, stream_of(call)>>>(sums, width);
    check_launch("adding up the gradients of wq and wk");
}

SUROGATE_CUDA_KERNEL("qk_norm_rope", qk_norm_rope);
SUROGATE_CUDA_KERNEL("qk_norm_rope_backward", qk_norm_rope_backward);

}  // namespace

}  // namespace surogate::cuda
