// lm_head_loss and lm_head_loss_grad (surogate/ops/lm_head_loss.py).
//
// Tokens with a target go through the head in chunks. The logits of a chunk lie in tiles of kTile rows of w, each tile
// dense; a first pass over the tiles computes logits and what the softmax needs of them, a second one turns the logits
// into their gradient while they pass and multiplies it into dw and into dh.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/kernel.h"
#include "cpu/gemm.h"
#include "cpu/items.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"
#include "cpu/workspace.h"

namespace surogate {
namespace {

constexpr int64_t kChunkLogits = int64_t{1} << 24;  // of a chunk, about: 64 MiB
constexpr int64_t kTile = 512;
// dh is a sum over all tiles. Each of so many groups of neighbouring tiles has a sum of its own, added up at the end in
// order, so that threads share this product too and the order is always the same.
constexpr int64_t kGroups = 32;

int64_t chunk_rows(int64_t tokens, int64_t vocabulary) {
    return std::min(tokens, std::clamp<int64_t>(kChunkLogits / vocabulary / 32 * 32, 64, 1024));
}

// Largest logit and sum of exp(logit - largest) of each row of a tile. Pads rows to whole vectors with -inf.
SUROGATE_SIMD void tile_softmax(float* logits, int64_t rows, int64_t columns, float* largest, float* sum) {
    const int64_t padded = simd::round_up(columns);
    for (int64_t r = 0; r < rows; ++r, logits += kTile) {
        simd::fill(logits, columns, padded, -std::numeric_limits<float>::infinity());
        const float top = simd::largest(logits, padded);
        simd::Floats total{};
        for (int64_t i = 0; i < padded; i += simd::kLanes) {
            simd::Floats e;
            simd::exp(simd::at(logits + i) - top, e);
            total += e;
        }
        largest[r] = top;
        sum[r] = simd::sum(total);
    }
}

// logits become scale * softmax.
SUROGATE_SIMD void tile_gradient(float* logits, int64_t rows, int64_t columns, const float* lse, float scale) {
    for (int64_t r = 0; r < rows; ++r, logits += kTile) {
        for (int64_t i = 0; i < simd::round_up(columns); i += simd::kLanes) {
            simd::Floats& x = simd::at(logits + i);
            simd::exp(x - lse[r], x);
            x *= scale;
        }
    }
}

struct Head {
    const Call& call;
    Tensor h, w, targets;
    int64_t tokens, dim, vocabulary, tiles, groups, chunk;
    // Pieces of the workspace.
    double* losses;            // [chunk]
    float* logits;             // [tiles, chunk, kTile]
    float* rows;               // [chunk, dim]: h of the tokens of the chunk
    float *largest, *sum;      // [tiles, chunk]
    float* lse;                // [chunk]
    float* wide = nullptr;     // [threads, kTile, dim]: a tile of w, if that is bf16
    float* partial = nullptr;  // [groups, chunk, dim]: shares of dh
    int32_t* token;            // [tokens]: which tokens have a target
    int64_t count = 0;         // how many

    Head(const Call& c, bool gradient) : call(c), h(c.in[0]), w(c.in[1]), targets(c.in[2]) {
        tokens = h.dim(0);
        dim = h.dim(1);
        vocabulary = w.dim(0);
        tiles = (vocabulary + kTile - 1) / kTile;
        groups = std::min(kGroups, tiles);
        chunk = chunk_rows(tokens, vocabulary);
        Workspace workspace(call);
        losses = workspace.take<double>(chunk);
        logits = workspace.take<float>(tiles * chunk * kTile);
        rows = workspace.take<float>(chunk * dim);
        largest = workspace.take<float>(tiles * chunk);
        sum = workspace.take<float>(tiles * chunk);
        lse = workspace.take<float>(chunk);
        if (w.dtype == DType::bf16) wide = workspace.take<float>(call.threads * std::min(kTile, vocabulary) * dim);
        if (gradient) partial = workspace.take<float>(groups * chunk * dim);
        token = workspace.take<int32_t>(tokens);
        const int32_t* target = targets.as<int32_t>();
        for (int64_t t = 0; t < tokens; ++t) {
            if (target[t] >= vocabulary) {
                throw std::invalid_argument("target " + std::to_string(target[t]) + " of token " + std::to_string(t) +
                                            " is outside the vocabulary of " + std::to_string(vocabulary));
            }
            if (target[t] >= 0) token[count++] = static_cast<int32_t>(t);
        }
    }

    int64_t columns(int64_t tile) const { return std::min(kTile, vocabulary - tile * kTile); }
    float* tile_logits(int64_t tile) const { return logits + tile * chunk * kTile; }

    // Rows of w that belong to a tile, as f32, and their ld.
    std::pair<const float*, int64_t> weights(int64_t tile, int thread) const {
        const int64_t ld = leading(w), first = tile * kTile;
        if (w.dtype == DType::f32) return {w.as<float>() + first * ld, ld};
        float* out = wide + thread * std::min(kTile, vocabulary) * dim;
        for (int64_t r = 0; r < columns(tile); ++r) widen_row(w.as<bf16>() + (first + r) * ld, out + r * dim, dim);
        return {out, dim};
    }

    // Logits, lse and losses of tokens first..first+n of the list; returns the sum of the losses.
    double forward(int64_t first, int64_t n) const {
        for_rows(n, dim, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                std::copy_n(h.as<float>() + token[first + r] * h.stride[0], dim, rows + r * dim);
            }
        });
        for_items(tiles, call.threads, [&](int64_t tile, int thread) {
            const auto [part, ld] = weights(tile, thread);
            gemm_block(false, true, n, columns(tile), dim, 1.f, rows, dim, part, ld, 0.f, tile_logits(tile), kTile);
            tile_softmax(tile_logits(tile), n, columns(tile), largest + tile * chunk, sum + tile * chunk);
        });
        for_rows(n, 8 * tiles, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                float top = largest[r];
                for (int64_t tile = 1; tile < tiles; ++tile) top = std::max(top, largest[tile * chunk + r]);
                double total = 0;
                for (int64_t tile = 0; tile < tiles; ++tile) {
                    total += sum[tile * chunk + r] * std::exp(static_cast<double>(largest[tile * chunk + r] - top));
                }
                const double log_sum = top + std::log(total);
                const int64_t target = targets.as<int32_t>()[token[first + r]];
                lse[r] = static_cast<float>(log_sum);
                losses[r] = log_sum - tile_logits(target / kTile)[r * kTile + target % kTile];
            }
        });
        double loss = 0;
        for (int64_t r = 0; r < n; ++r) loss += losses[r];
        return loss;
    }

    // dh of the chunk's tokens; adds to dw (if there) with factor `keep` on what it holds.
    void backward(int64_t first, int64_t n, float scale, const Tensor& dh, const Tensor& dw, float keep) const {
        for_items(groups, call.threads, [&](int64_t group, int thread) {
            const int64_t begin = group * tiles / groups, end = (group + 1) * tiles / groups;
            for (int64_t tile = begin; tile < end; ++tile) {
                float* x = tile_logits(tile);
                tile_gradient(x, n, columns(tile), lse, scale);
                for (int64_t r = 0; r < n; ++r) {
                    const int64_t target = targets.as<int32_t>()[token[first + r]];
                    if (target / kTile == tile) x[r * kTile + target % kTile] -= scale;
                }
                const auto [part, ld] = weights(tile, thread);
                gemm_block(false, false, n, dim, columns(tile), 1.f, x, kTile, part, ld, tile == begin ? 0.f : 1.f,
                           partial + group * chunk * dim, dim);
                if (dw) {
                    const int64_t ld_dw = leading(dw);
                    gemm_block(true, false, columns(tile), dim, n, 1.f, x, kTile, rows, dim, keep,
                               dw.as<float>() + tile * kTile * ld_dw, ld_dw);
                }
            }
        });
        for_rows(n, groups * dim, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                float* out = dh.as<float>() + token[first + r] * dh.stride[0];
                std::copy_n(partial + r * dim, dim, out);
                for (int64_t group = 1; group < groups; ++group) {
                    const float* share = partial + (group * chunk + r) * dim;
                    for (int64_t i = 0; i < dim; ++i) out[i] += share[i];
                }
            }
        });
    }
};

void store_loss(const Tensor& out, const Tensor& acc, double loss) {
    *out.as<double>() = acc ? *acc.as<double>() + loss : loss;
}

void lm_head_loss(const Call& call) {
    const Head head(call, false);
    double loss = 0;
    for (int64_t first = 0; first < head.count; first += head.chunk) {
        loss += head.forward(first, std::min(head.chunk, head.count - first));
    }
    store_loss(call.out[0], call.in[3], loss);
}

void lm_head_loss_grad(const Call& call) {
    const Head head(call, true);
    const Tensor &dh = call.out[1], &dw = call.out[2], &acc_dw = call.in[5];
    const float scale = *call.in[3].as<float>();
    // dh may be h: only rows without a target, which nothing reads, are written here.
    for_rows(head.tokens, head.dim, call.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            if (head.targets.as<int32_t>()[t] < 0) std::fill_n(dh.as<float>() + t * dh.stride[0], head.dim, 0.f);
        }
    });
    if (dw && !acc_dw && head.count == 0) {
        for_rows(head.vocabulary, head.dim, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) std::fill_n(dw.as<float>() + r * leading(dw), head.dim, 0.f);
        });
    }
    double loss = 0;
    for (int64_t first = 0; first < head.count; first += head.chunk) {
        const int64_t n = std::min(head.chunk, head.count - first);
        loss += head.forward(first, n);
        head.backward(first, n, scale, dh, dw, first > 0 || acc_dw ? 1.f : 0.f);
    }
    store_loss(call.out[0], call.in[4], loss);
}

SUROGATE_CPU_KERNEL("lm_head_loss", lm_head_loss);
SUROGATE_CPU_KERNEL("lm_head_loss_grad", lm_head_loss_grad);

}  // namespace
}  // namespace surogate
