// attention and attention_backward (surogate/ops/attention.py): FlashAttention-2's blocks (Dao 2023) with OpenBLAS
// inside them.
//
// A document is cut into blocks of queries and blocks of keys, counted from its first token. Only blocks that see each
// other are computed. Products read q, k, v where they lie, so any row stride will do.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "core/kernel.h"
#include "cpu/gemm.h"
#include "cpu/items.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"
#include "cpu/workspace.h"

namespace surogate {
namespace {

// Queries of a block: more waste work above the diagonal, fewer slow the products.
constexpr int64_t kQueries = 64;
constexpr int64_t kKeysForward = 256, kKeysBackward = 128;  // multiples of kQueries and of simd::kLanes
constexpr float kInf = std::numeric_limits<float>::infinity();

// A tensor [tokens, heads, head_dim].
struct Heads {
    float* data;
    int64_t row, head;  // strides

    explicit Heads(const Tensor& t) : data(t.as<float>()), row(t.stride[0]), head(t.stride[1]) {}
    float* at(int64_t token, int64_t h) const { return data + token * row + h * head; }
    int64_t ld(int64_t dim) const { return std::max(row, dim); }  // of one head's [tokens, dim], as BLAS takes it
};

struct Boundaries {
    const int32_t* at;
    int64_t documents;

    Boundaries(const Tensor& cu, int64_t tokens) : at(cu.as<int32_t>()), documents(cu.dim(0) - 1) {
        bool good = at[0] == 0 && at[documents] == tokens;
        for (int64_t d = 0; good && d < documents; ++d) good = at[d] <= at[d + 1];
        if (!good) throw std::invalid_argument("cu_seqlens must rise from 0 to the number of tokens");
    }
};

// Which keys of a block that begins with key `first_key` a query sees: [begin, end), within [0, keys).
struct Seen {
    int64_t begin, end;

    Seen(int64_t query, int64_t first_key, int64_t keys, int64_t window) {
        end = std::clamp<int64_t>(query - first_key + 1, 0, keys);
        begin = window > 0 ? std::clamp<int64_t>(query - window + 1 - first_key, 0, end) : 0;
    }
};

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// ---- forward

// Running softmax of a block of queries: for each the largest score so far, the sum of exponentials below it, and the
// factor by which what was summed before must shrink.
struct Running {
    float largest[kQueries], sum[kQueries], shrink[kQueries];
};

// s[rows, kKeysForward], scores, becomes exponentials; keys that are not seen become 0.
SUROGATE_SIMD void softmax_block(float* s, int64_t rows, int64_t keys, int64_t query, int64_t first_key, int64_t window,
                                 Running& run) {
    for (int64_t r = 0; r < rows; ++r, s += kKeysForward) {
        const Seen seen(query + r, first_key, keys, window);
        run.shrink[r] = 1.f;
        if (seen.begin == seen.end) {
            simd::fill(s, 0, keys, 0.f);
            continue;
        }
        const int64_t begin = seen.begin / simd::kLanes * simd::kLanes, end = simd::round_up(seen.end);
        simd::fill(s, begin, seen.begin, -kInf);
        simd::fill(s, seen.end, end, -kInf);
        const float top = std::max(run.largest[r], simd::largest(s + begin, end - begin));
        const float sum = simd::exp_and_sum(s + begin, end - begin, top);
        run.shrink[r] = std::exp(run.largest[r] - top);
        run.sum[r] = run.sum[r] * run.shrink[r] + sum;
        run.largest[r] = top;
        simd::fill(s, 0, begin, 0.f);
        simd::fill(s, end, keys, 0.f);
    }
}

SUROGATE_SIMD void scale_rows(float* x, int64_t ld, int64_t rows, int64_t n, const float* factor) {
    for (int64_t r = 0; r < rows; ++r, x += ld) {
        if (factor[r] == 1.f) continue;
        for (int64_t i = 0; i < n; ++i) x[i] *= factor[r];
    }
}

// A block of queries of one document.
struct Block {
    int64_t begin, end;  // the document
    int64_t query;       // the block's first token
};

struct Forward {
    Heads q, k, v, o;
    Tensor lse;
    int64_t dim, group, window;
    float scale;

    static int64_t scratch(int64_t dim) { return kQueries * (kKeysForward + dim); }

    void block(const Block& at, int64_t head, float* scratch) const {
        float *s = scratch, *sum = s + kQueries * kKeysForward;
        Running run;
        std::fill_n(run.largest, kQueries, -kInf);
        std::fill_n(run.sum, kQueries, 0.f);
        const int64_t rows = std::min(kQueries, at.end - at.query), last = at.query + rows;
        const int64_t first = window > 0 ? std::max(at.begin, at.query - window + 1) : at.begin;
        for (int64_t key = first; key < last; key += kKeysForward) {
            const int64_t keys = std::min(kKeysForward, last - key);
            gemm_block(false, true, rows, keys, dim, scale, q.at(at.query, head), q.ld(dim), k.at(key, head / group),
                       k.ld(dim), 0.f, s, kKeysForward);
            softmax_block(s, rows, keys, at.query, key, window, run);
            if (key > first) scale_rows(sum, dim, rows, dim, run.shrink);
            gemm_block(false, false, rows, dim, keys, 1.f, s, kKeysForward, v.at(key, head / group), v.ld(dim),
                       key > first ? 1.f : 0.f, sum, dim);
        }
        for (int64_t r = 0; r < rows; ++r) {
            float* out = o.at(at.query + r, head);
            const float inverse = 1.f / run.sum[r];
            for (int64_t i = 0; i < dim; ++i) out[i] = sum[r * dim + i] * inverse;
            lse.as<float>()[head * lse.stride[0] + at.query + r] = run.largest[r] + std::log(run.sum[r]);
        }
    }
};

void attention(const Call& call) {
    const Tensor &q = call.in[0], &k = call.in[1], &v = call.in[2];
    const int64_t tokens = q.dim(0), heads = q.dim(1), dim = q.dim(2);
    const Boundaries documents(call.in[3], tokens);
    const Forward forward{
        .q = Heads(q),
        .k = Heads(k),
        .v = Heads(v),
        .o = Heads(call.out[0]),
        .lse = call.out[1],
        .dim = dim,
        .group = heads / k.dim(1),
        .window = call.attrs.integer("window"),
        .scale = static_cast<float>(call.attrs.real("scale")),
    };
    Workspace workspace(call);
    int64_t count = 0;
    for (int64_t d = 0; d < documents.documents; ++d) count += pieces(documents.at[d + 1] - documents.at[d], kQueries);
    Block *const blocks = workspace.take<Block>(count), *next = blocks;
    for (int64_t d = 0; d < documents.documents; ++d) {
        const int64_t begin = documents.at[d], end = documents.at[d + 1];
        for (int64_t query = begin; query < end; query += kQueries) *next++ = {begin, end, query};
    }
    const int64_t each = Forward::scratch(dim);
    float* scratch = workspace.take<float>(call.threads * each);
    // From the last block on: those that see most keys are not left for the end, where threads would wait for one.
    for_items(count * heads, call.threads, [&](int64_t item, int thread) {
        forward.block(blocks[count - 1 - item / heads], item % heads, scratch + thread * each);
    });
}

SUROGATE_CPU_KERNEL("attention", attention);

// ---- backward

// s[rows, kKeysBackward], scores, becomes P = exp(s - lse); dp becomes dS = scale * P * (dp - delta). Keys that are
// not seen become 0 in both.
SUROGATE_SIMD void softmax_backward_block(float* s, float* dp, int64_t rows, int64_t keys, int64_t query,
                                          int64_t first_key, int64_t window, const float* lse, const float* delta,
                                          float scale) {
    for (int64_t r = 0; r < rows; ++r, s += kKeysBackward, dp += kKeysBackward) {
        const Seen seen(query + r, first_key, keys, window);
        const int64_t begin = seen.begin / simd::kLanes * simd::kLanes, end = simd::round_up(seen.end);
        for (int64_t i = begin; i < end; i += simd::kLanes) {
            simd::Floats &p = simd::at(s + i), &ds = simd::at(dp + i);
            simd::exp(p - lse[r], p);
            ds = scale * p * (ds - delta[r]);
        }
        for (float* x : {s, dp}) {
            simd::fill(x, 0, seen.begin, 0.f);
            simd::fill(x, seen.end, keys, 0.f);
        }
    }
}

SUROGATE_SIMD float dot(const float* a, const float* b, int64_t n) {
    simd::Floats sums{};
    int64_t i = 0;
    for (; i + simd::kLanes <= n; i += simd::kLanes) sums += simd::at(a + i) * simd::at(b + i);
    float sum = simd::sum(sums);
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// What a thread takes at a time. All parts of a document and key head add into a given element in the same order, so
// how the work is divided does not show in the bits.
struct Item {
    enum Part : int32_t { all, keys, queries };
    int64_t cost;
    int32_t begin, end;  // the document
    int32_t kv_head;
    int32_t part;
    int32_t block;  // of keys or of queries
};

struct Backward {
    Heads dout, q, k, v, dq, dk, dv;
    Tensor lse;
    const float* delta;  // [heads, tokens]: rowsum(dO * O)
    int64_t tokens, dim, group, window;
    float scale;

    static constexpr int64_t kScratch = kQueries * kKeysBackward * 2;

    // Blocks of queries that see a block of keys of the document: [first, last).
    std::pair<int64_t, int64_t> queries_of(int64_t length, int64_t key_block) const {
        const int64_t first_key = key_block * kKeysBackward, end = std::min(length, first_key + kKeysBackward);
        const int64_t last_query = window > 0 ? std::min(length - 1, end - 1 + window - 1) : length - 1;
        return {first_key / kQueries, last_query / kQueries + 1};
    }

    std::pair<int64_t, int64_t> keys_of(int64_t length, int64_t query_block) const {
        const int64_t query = query_block * kQueries, end = std::min(length, query + kQueries);
        const int64_t first_key = window > 0 ? std::max<int64_t>(0, query - window + 1) : 0;
        return {first_key / kKeysBackward, (end - 1) / kKeysBackward + 1};
    }

    // One block of queries against one block of keys: adds to dk and dv of the keys, to dq of the queries, or to all.
    void pair(const Item& item, int64_t head, int64_t query_block, int64_t key_block, float* s) const {
        const int64_t query = item.begin + query_block * kQueries, key = item.begin + key_block * kKeysBackward;
        const int64_t rows = std::min<int64_t>(kQueries, item.end - query);
        const int64_t keys = std::min(kKeysBackward, query + rows - key), h = item.kv_head;
        float* ds = s + kQueries * kKeysBackward;
        const auto product = [&](bool ta, bool tb, int64_t m, int64_t n, int64_t depth, float alpha, const float* a,
                                 int64_t lda, const Heads& b, const float* b_at, float beta, float* c, int64_t ldc) {
            gemm_block(ta, tb, m, n, depth, alpha, a, lda, b_at, b.ld(dim), beta, c, ldc);
        };
        const float *q_at = q.at(query, head), *do_at = dout.at(query, head);
        product(false, true, rows, keys, dim, scale, q_at, q.ld(dim), k, k.at(key, h), 0.f, s, kKeysBackward);
        product(false, true, rows, keys, dim, 1.f, do_at, dout.ld(dim), v, v.at(key, h), 0.f, ds, kKeysBackward);
        softmax_backward_block(s, ds, rows, keys, query, key, window, lse.as<float>() + head * lse.stride[0] + query,
                               delta + head * tokens + query, scale);
        if (item.part != Item::queries) {
            product(true, false, keys, dim, rows, 1.f, s, kKeysBackward, dout, do_at, 1.f, dv.at(key, h), dv.ld(dim));
            product(true, false, keys, dim, rows, 1.f, ds, kKeysBackward, q, q_at, 1.f, dk.at(key, h), dk.ld(dim));
        }
        if (item.part != Item::keys) {
            product(false, false, rows, dim, keys, 1.f, ds, kKeysBackward, k, k.at(key, h), 1.f, dq.at(query, head),
                    dq.ld(dim));
        }
    }

    void zero(const Heads& x, int64_t begin, int64_t end, int64_t head) const {
        for (int64_t token = begin; token < end; ++token) std::fill_n(x.at(token, head), dim, 0.f);
    }

    void run(const Item& item, float* scratch) const {
        const int64_t length = item.end - item.begin, first_head = item.kv_head * group;
        int64_t first_key_block = 0, key_blocks = pieces(length, kKeysBackward);
        if (item.part == Item::keys) {
            first_key_block = item.block;
            key_blocks = item.block + 1;
        } else if (item.part == Item::queries) {
            std::tie(first_key_block, key_blocks) = keys_of(length, item.block);
        }
        if (item.part != Item::queries) {
            const int64_t begin = item.begin + first_key_block * kKeysBackward;
            const int64_t end = std::min<int64_t>(item.end, item.begin + key_blocks * kKeysBackward);
            zero(dk, begin, end, item.kv_head);
            zero(dv, begin, end, item.kv_head);
        }
        if (item.part != Item::keys) {
            const bool one = item.part == Item::queries;
            const int64_t begin = one ? item.begin + item.block * kQueries : item.begin;
            const int64_t end = one ? std::min<int64_t>(item.end, begin + kQueries) : item.end;
            for (int64_t head = first_head; head < first_head + group; ++head) zero(dq, begin, end, head);
        }
        for (int64_t head = first_head; head < first_head + group; ++head) {
            for (int64_t key_block = first_key_block; key_block < key_blocks; ++key_block) {
                auto [first, last] = queries_of(length, key_block);
                if (item.part == Item::queries) {
                    first = item.block;
                    last = item.block + 1;
                }
                for (int64_t block = first; block < last; ++block) pair(item, head, block, key_block, scratch);
            }
        }
    }

    // The items of a document and key head in two passes, one for dk and dv, one for dq: 4 + 3 products a pair of
    // blocks instead of 5, but each block on its own.
    int64_t divide(Item whole, Item* items) const {
        const int64_t length = whole.end - whole.begin;
        Item* next = items;
        whole.part = Item::keys;
        for (whole.block = 0; whole.block < pieces(length, kKeysBackward); ++whole.block) {
            const auto [first, last] = queries_of(length, whole.block);
            *next = whole;
            next++->cost = 4 * (last - first);
        }
        whole.part = Item::queries;
        for (whole.block = 0; whole.block < pieces(length, kQueries); ++whole.block) {
            const auto [first, last] = keys_of(length, whole.block);
            *next = whole;
            next++->cost = 3 * (last - first);
        }
        return next - items;
    }
};

// When the last thread is done, if each takes the next item when it is free.
int64_t makespan(const Item* items, int64_t count, int64_t* busy, int threads) {
    std::fill_n(busy, threads, 0);
    for (int64_t i = 0; i < count; ++i) *std::min_element(busy, busy + threads) += items[i].cost;
    return *std::max_element(busy, busy + threads);
}

// How many of the items (longest first) to divide so that the threads are done soonest. Dividing one costs 7/5 of it.
int64_t how_many_to_divide(const Item* items, int64_t count, int64_t* busy, int threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += items[i].cost;
    int64_t best = 0, soonest = makespan(items, count, busy, threads);
    for (int64_t divided = 1; divided <= std::min<int64_t>(count, threads); ++divided) {
        total += items[divided - 1].cost * 2 / 5;
        if (total / threads >= soonest) break;
        const int64_t done = std::max(total / threads, makespan(items + divided, count - divided, busy, threads));
        if (done < soonest) {
            soonest = done;
            best = divided;
        }
    }
    return best;
}

void attention_backward(const Call& call) {
    const Tensor &dout = call.in[0], &q = call.in[1], &k = call.in[2], &v = call.in[3], &o = call.in[4];
    const int64_t tokens = q.dim(0), heads = q.dim(1), kv_heads = k.dim(1), dim = q.dim(2);
    const Boundaries documents(call.in[6], tokens);

    Workspace workspace(call);
    int64_t* busy = workspace.take<int64_t>(call.threads);
    const int64_t most = tokens / kQueries + tokens / kKeysBackward + 3 * (documents.documents + 1);
    Item* items = workspace.take<Item>(most * kv_heads);
    float* delta = workspace.take<float>(heads * tokens);
    float* scratch = workspace.take<float>(call.threads * Backward::kScratch);

    const Backward backward{
        .dout = Heads(dout),
        .q = Heads(q),
        .k = Heads(k),
        .v = Heads(v),
        .dq = Heads(call.out[0]),
        .dk = Heads(call.out[1]),
        .dv = Heads(call.out[2]),
        .lse = call.in[5],
        .delta = delta,
        .tokens = tokens,
        .dim = dim,
        .group = heads / kv_heads,
        .window = call.attrs.integer("window"),
        .scale = static_cast<float>(call.attrs.real("scale")),
    };
    for_rows(tokens, heads * dim, call.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t h = 0; h < heads; ++h) {
                delta[h * tokens + t] = dot(backward.dout.at(t, h), Heads(o).at(t, h), dim);
            }
        }
    });

    int64_t count = 0;
    for (int64_t d = 0; d < documents.documents; ++d) {
        const int32_t begin = documents.at[d], end = documents.at[d + 1];
        if (begin == end) continue;
        int64_t pairs = 0;
        for (int64_t block = 0; block < pieces(end - begin, kKeysBackward); ++block) {
            const auto [first, last] = backward.queries_of(end - begin, block);
            pairs += last - first;
        }
        for (int32_t h = 0; h < kv_heads; ++h) items[count++] = {5 * pairs, begin, end, h, Item::all, 0};
    }
    const auto longer = [](const Item& a, const Item& b) { return a.cost > b.cost; };
    std::sort(items, items + count, longer);
    // The divided items go behind the others, their parts after them; then they leave the list.
    const int64_t divided = how_many_to_divide(items, count, busy, call.threads);
    std::rotate(items, items + divided, items + count);
    const int64_t whole = count - divided;
    int64_t parts = 0;
    for (int64_t i = 0; i < divided; ++i) parts += backward.divide(items[whole + i], items + count + parts);
    std::copy(items + count, items + count + parts, items + whole);
    count = whole + parts;
    std::sort(items, items + count, longer);
    for_items(count, call.threads,
              [&](int64_t i, int thread) { backward.run(items[i], scratch + thread * Backward::kScratch); });
}

SUROGATE_CPU_KERNEL("attention_backward", attention_backward);

}  // namespace
}  // namespace surogate
