// Causal attention inside documents. bf16 goes to cuDNN; f32, and head sizes that no tensor core takes, to plain
// kernels (attention_plain.cu), which are right and slow.
//
// Where cuDNN computes, the memory of `lse` holds [tokens, heads], which is what its packed kernels write and read; the
// plain kernels keep to the op's [heads, tokens]. Forward and backward pass find out from q, k, v and o which it is.
#include <algorithm>
#include <stdexcept>

#include "cuda/attention_plain.h"
#include "cuda/cudnn.h"
#include "cuda/plugin.h"

namespace surogate::cuda {

namespace {

constexpr int kMostOffsets = 8;  // tensors with distances between tokens of their own

// For every document its length, and for every distance between tokens the documents' first elements.
struct Boundaries {
    const int32_t* cu_seqlens;
    int documents, count;
    int64_t strides[kMostOffsets];
    int32_t* lengths;
    int64_t* offsets[kMostOffsets];
};

__global__ void measure_documents(Boundaries b) {
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i <= b.documents;
         i += static_cast<int>(gridDim.x * blockDim.x)) {
        const int64_t begin = b.cu_seqlens[i];
        if (i < b.documents) b.lengths[i] = static_cast<int32_t>(b.cu_seqlens[i + 1] - begin);
        for (int j = 0; j < b.count; ++j) b.offsets[j][i] = begin * b.strides[j];
    }
}

// Between packed statistics [tokens, heads] and padded ones [documents, heads, length]; a block a document and head.
template <bool kPack>
__global__ void move_statistics(const int32_t* cu_seqlens, int heads, int64_t length, float* packed, float* padded) {
    const int64_t document = blockIdx.x, head = blockIdx.y;
    const int64_t begin = cu_seqlens[document], tokens = cu_seqlens[document + 1] - begin;
    float* row = padded + (document * heads + head) * length;
    for (int64_t i = threadIdx.x; i < tokens; i += blockDim.x) {
        float& place = packed[(begin + i) * heads + head];
        if (kPack) {
            place = row[i];
        } else {
            row[i] = place;
        }
    }
}

// Rows of 16-byte pieces to where a tensor has its tokens; grid.y picks one of two.
struct Move {
    const uint4* from[2];
    uint4* to[2];
    int64_t step[2];  // pieces from token to token of the targets
};

__global__ void move_rows(Move move, int64_t tokens, int width) {
    const uint4* from = move.from[blockIdx.y];
    uint4* to = move.to[blockIdx.y];
    const int64_t all = tokens * width, step = move.step[blockIdx.y];
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < all;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        to[i / width * step + i % width] = from[i];
    }
}

Steps steps_of(const Tensor& t) { return {t.stride[0], t.stride[1]}; }

// cuDNN moves rows by 16 bytes.
bool aligned(const Tensor& t) {
    constexpr int64_t kElements = 8;
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] % kElements == 0 &&
           t.stride[1] % kElements == 0;
}

struct Operands {
    Tensor q, k, v, o, lse, cu_seqlens, dout, dq, dk, dv;
    bool backward;
};

// Whether cuDNN computed, or will compute, o and lse. It cannot in f32, and with head sizes and strides that are odd: a
// bf16 model has neither.
bool forward_is_plain(const Operands& x) {
    if (x.q.dtype == DType::f32 || x.q.dim(2) % 8 != 0 || x.q.dim(0) == 1) return true;
    return !(aligned(x.q) && aligned(x.k) && aligned(x.v) && aligned(x.o) && x.lse.contiguous());
}

bool is_plain(const Operands& x) {
    if (forward_is_plain(x)) return true;
    return x.backward && !(aligned(x.dout) && aligned(x.dq) && aligned(x.dk) && aligned(x.dv));
}

// With grouped heads cuDNN's workspace holds dk and dv of every query head, at the distances between tokens of its
// results: windows of a wide matrix would make that many times larger. They are computed dense and moved.
bool moves_keys(const Operands& x) {
    if (!x.backward || x.q.dim(1) == x.k.dim(1)) return false;
    return !x.dk.contiguous() || !x.dv.contiguous();
}

SdpaProblem problem_of(const Call& call, const Operands& x) {
    SdpaProblem p;
    p.backward = x.backward;
    p.documents = x.cu_seqlens.dim(0) - 1;
    p.tokens = x.q.dim(0);
    p.heads = x.q.dim(1);
    p.kv_heads = x.k.dim(1);
    p.dim = x.q.dim(2);
    p.length = call.attrs.integer("max_length", 0);
    if (p.length == 0) p.length = p.tokens;
    // cuDNN wants more than one row; a document of length 1 is none to it.
    p.length = std::max<int64_t>(p.length, 2);
    p.window = call.attrs.integer("window", 0);
    if (p.window >= p.length) p.window = 0;
    p.scale = static_cast<float>(call.attrs.real("scale", 1.0));
    p.deterministic = x.backward && call.attrs.flag("deterministic", false);
    // These architectures' backward pass reads padded statistics alone.
    const int major = device().sm / 10;
    p.padded_statistics = major == 8 || major == 12;
    p.q = steps_of(x.q), p.k = steps_of(x.k), p.v = steps_of(x.v), p.o = steps_of(x.o);
    if (x.backward) p.dout = steps_of(x.dout), p.dq = steps_of(x.dq), p.dk = steps_of(x.dk), p.dv = steps_of(x.dv);
    if (x.backward && p.q.token != p.dq.token) {
        // Seen on an H200 with cuDNN 9.19: with two strides dq comes out wrong, and nothing says so.
        throw std::invalid_argument("q and dq must have the same row stride");
    }
    if (moves_keys(x)) p.dk = p.dv = {p.kv_heads * p.dim, p.dim};
    return p;
}

void* offsets_of(const void* context, int64_t stride) {
    const auto& b = *static_cast<const Boundaries*>(context);
    for (int j = 0; j < b.count; ++j) {
        if (b.strides[j] == stride) return b.offsets[j];
    }
    throw std::logic_error("no offsets for this distance between tokens");
}

void run_cudnn(const Call& call, const Operands& x) {
    const SdpaProblem p = problem_of(call, x);
    cudaStream_t stream = stream_of(call);
    if (!*call.state) *call.state = plan_sdpa(p);
    auto plan = std::static_pointer_cast<Sdpa>(*call.state);

    Scratch scratch(call.workspace);
    Boundaries b{x.cu_seqlens.as<int32_t>(), static_cast<int>(p.documents), 0, {}, nullptr, {}};
    auto want = [&](int64_t stride) {
        for (int j = 0; j < b.count; ++j) {
            if (b.strides[j] == stride) return;
        }
        if (b.count == kMostOffsets) throw std::logic_error("too many distances between tokens");
        b.offsets[b.count] = static_cast<int64_t*>(scratch.take((p.documents + 1) * 8, "attention's offsets"));
        b.strides[b.count++] = stride;
    };
    for (const Steps& steps : {p.q, p.k, p.v, p.o}) want(steps.token);
    if (x.backward) {
        for (const Steps& steps : {p.dout, p.dq, p.dk, p.dv}) want(steps.token);
    }
    if (!p.padded_statistics) want(p.heads);
    b.lengths = static_cast<int32_t*>(scratch.take(p.documents * 4, "attention's lengths"));
    const auto blocks = static_cast<unsigned>((p.documents + 1 + 255) / 256);
    measure_documents<<<blocks, 256, 0, stream>>>(b);
    check(cudaGetLastError(), "measuring documents");

    float* padded = nullptr;
    const dim3 pairs(static_cast<unsigned>(p.documents), static_cast<unsigned>(p.heads));
    if (p.padded_statistics) {
        padded =
            static_cast<float*>(scratch.take(p.documents * p.heads * p.length * 4, "attention's padded statistics"));
        if (x.backward) {
            move_statistics<false><<<pairs, 128, 0, stream>>>(b.cu_seqlens, static_cast<int>(p.heads), p.length,
                                                              x.lse.as<float>(), padded);
            check(cudaGetLastError(), "padding statistics");
        }
    }

    SdpaOperands operands;
    operands.q = x.q.data, operands.k = x.k.data, operands.v = x.v.data, operands.o = x.o.data;
    operands.dout = x.dout.data, operands.dq = x.dq.data, operands.dk = x.dk.data, operands.dv = x.dv.data;
    operands.statistics = padded != nullptr ? padded : x.lse.data;
    operands.lengths = b.lengths;
    operands.offsets = offsets_of;
    operands.context = &b;
    const bool moves = moves_keys(x);
    const int64_t key_bytes = p.tokens * p.kv_heads * p.dim * 2;
    if (moves) {
        for (const Tensor* t : {&x.dk, &x.dv}) {
            if (t->stride[1] != p.dim) throw std::invalid_argument("heads of dk and dv must lie side by side");
        }
        operands.dk = scratch.take(key_bytes, "dense dk");
        operands.dv = scratch.take(key_bytes, "dense dv");
    }
    operands.workspace = scratch.take(plan->workspace(), "cuDNN's attention");
    plan->run(operands, stream);
    if (moves) {
        constexpr int64_t kPiece = 8;  // elements
        Move move{{static_cast<uint4*>(operands.dk), static_cast<uint4*>(operands.dv)},
                  {x.dk.as<uint4>(), x.dv.as<uint4>()},
                  {x.dk.stride[0] / kPiece, x.dv.stride[0] / kPiece}};
        const auto width = static_cast<int>(p.kv_heads * p.dim / kPiece);
        const auto blocks = static_cast<unsigned>(std::min<int64_t>((p.tokens * width + 255) / 256, 4096));
        move_rows<<<dim3(blocks, 2), 256, 0, stream>>>(move, p.tokens, width);
        check(cudaGetLastError(), "moving dk and dv");
    }
    if (padded != nullptr && !x.backward) {
        move_statistics<true>
            <<<pairs, 128, 0, stream>>>(b.cu_seqlens, static_cast<int>(p.heads), p.length, x.lse.as<float>(), padded);
        check(cudaGetLastError(), "packing statistics");
    }
}

void run_plain(const Call& call, const Operands& x) {
    PlainAttention a{x.q, x.k, x.v, x.o, x.dout, x.dq, x.dk, x.dv, x.lse.as<float>(), x.cu_seqlens.as<int32_t>()};
    const bool heads_first = forward_is_plain(x);
    a.lse_head = heads_first ? x.lse.stride[0] : 1;
    a.lse_token = heads_first ? 1 : x.q.dim(1);
    a.documents = static_cast<int>(x.cu_seqlens.dim(0) - 1);
    a.window = call.attrs.integer("window", 0);
    a.scale = static_cast<float>(call.attrs.real("scale", 1.0));
    if (x.backward) {
        plain_attention_backward(a, stream_of(call));
    } else {
        plain_attention(a, stream_of(call));
    }
}

void run(const Call& call, const Operands& x) {
    for (const Tensor* t : {&x.k, &x.v, &x.o}) {
        if (t->dtype != x.q.dtype) throw std::invalid_argument("attention's tensors must have one dtype");
    }
    if (is_plain(x)) {
        run_plain(call, x);
    } else {
        run_cudnn(call, x);
    }
}

// q, k, v, cu_seqlens -> o, lse
void attention(const Call& call) {
    run(call, {call.in[0], call.in[1], call.in[2], call.out[0], call.out[1], call.in[3], {}, {}, {}, {}, false});
}

// do, q, k, v, o, lse, cu_seqlens -> dq, dk, dv
void attention_backward(const Call& call) {
    run(call, {call.in[1], call.in[2], call.in[3], call.in[4], call.in[5], call.in[6], call.in[0], call.out[0],
               call.out[1], call.out[2], true});
}

SUROGATE_CUDA_KERNEL("attention", attention);
SUROGATE_CUDA_KERNEL("attention_backward", attention_backward);

}  // namespace

}  // namespace surogate::cuda
