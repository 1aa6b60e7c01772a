// Work in fixed tiles: how a tensor is cut depends on shapes and strides alone, so results never depend on the number
// of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/tensor.h"

namespace surogate {

// Elements of a tile: some 10 microseconds of memory-bound work, well above the cost of handing it to a thread.
constexpr int64_t kTileElements = 1 << 14;

// fn(tile) for tile = 0..tiles-1. fn must not throw: check operands before.
template <typename Fn>
void for_tiles(int64_t tiles, int threads, const Fn& fn) {
    if (tiles <= 1 || threads <= 1) {
        for (int64_t tile = 0; tile < tiles; ++tile) fn(tile);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(std::min<int64_t>(tiles, threads)))
    for (int64_t tile = 0; tile < tiles; ++tile) fn(tile);
}

// fn(begin, end) over 0..n in tiles of `step`.
template <typename Fn>
void for_ranges(int64_t n, int64_t step, int threads, const Fn& fn) {
    for_tiles((n + step - 1) / step, threads, [&](int64_t tile) { fn(tile * step, std::min(n, (tile + 1) * step)); });
}

// fn(begin, end) over `rows` rows of `width` elements.
template <typename Fn>
void for_rows(int64_t rows, int64_t width, int threads, const Fn& fn) {
    for_ranges(rows, std::max<int64_t>(1, kTileElements / std::max<int64_t>(1, width)), threads, fn);
}

// Element offsets of the rows of a tensor, without the divisions of Tensor::row_offset where the rows are evenly
// spaced (rank 2, contiguous, a column view). `inner` trailing dimensions belong to the row; with 0, a row is one
// element.
class RowOffsets {
   public:
    explicit RowOffsets(const Tensor& t, int inner = 1) : outer_(std::max(0, t.rank - inner)) {
        for (int i = 0; i < outer_; ++i) {
            shape_[i] = t.shape[i];
            stride_[i] = t.stride[i];
        }
        // Merge dimensions that one stride covers; drop those of size 1.
        int kept = 0;
        for (int i = 0; i < outer_; ++i) {
            if (shape_[i] == 1) continue;
            if (kept > 0 && stride_[kept - 1] == stride_[i] * shape_[i]) {
                shape_[kept - 1] *= shape_[i];
                stride_[kept - 1] = stride_[i];
            } else {
                shape_[kept] = shape_[i];
                stride_[kept++] = stride_[i];
            }
        }
        outer_ = kept;
    }

    int64_t operator[](int64_t row) const {
        if (outer_ == 0) return 0;
        int64_t offset = 0;
        for (int i = outer_ - 1; i > 0; --i) {
            offset += (row % shape_[i]) * stride_[i];
            row /= shape_[i];
        }
        return offset + row * stride_[0];
    }

   private:
    int outer_;
    int64_t shape_[kMaxRank] = {};
    int64_t stride_[kMaxRank] = {};
};

// Walks N tensors of one shape together, in runs that are contiguous in all of them: one run where all are dense.
template <int N>
class Walk {
   public:
    explicit Walk(const std::array<Tensor, N>& tensors) {
        const Tensor& first = tensors[0];
        for (int i = 0; i < first.rank; ++i) {
            if (first.shape[i] == 1) continue;
            bool merge = rank_ > 0;
            for (int k = 0; merge && k < N; ++k) merge = stride_[rank_ - 1][k] == tensors[k].stride[i] * first.shape[i];
            if (merge) --rank_;
            shape_[rank_] = (merge ? shape_[rank_] : 1) * first.shape[i];
            for (int k = 0; k < N; ++k) stride_[rank_][k] = tensors[k].stride[i];
            ++rank_;
        }
        // The last dimension is the run if it is dense in all tensors; a dimension that was dropped because its size
        // is 1 leaves runs of one element.
        bool dense = rank_ > 0;
        for (int k = 0; dense && k < N; ++k) dense = stride_[rank_ - 1][k] == 1;
        length_ = dense ? shape_[--rank_] : 1;
        runs_ = 1;
        for (int i = 0; i < rank_; ++i) runs_ *= shape_[i];
        if (length_ == 0) runs_ = 0;
        pieces_ = std::max<int64_t>(1, (length_ + kTileElements - 1) / kTileElements);
        runs_per_tile_ = pieces_ > 1 ? 1 : std::max<int64_t>(1, kTileElements / std::max<int64_t>(1, length_));
    }

    // At most 2 * elements / kTileElements + 1.
    int64_t tiles() const { return pieces_ > 1 ? runs_ * pieces_ : (runs_ + runs_per_tile_ - 1) / runs_per_tile_; }

    // fn(offsets, first, count) for the runs of one tile in order: the element offset in each tensor, the row-major
    // index of the run's first element, and how many elements follow.
    template <typename Fn>
    void visit(int64_t tile, const Fn& fn) const {
        if (pieces_ > 1) {
            const int64_t run = tile / pieces_, begin = tile % pieces_ * kTileElements;
            std::array<int64_t, N> offsets = run_offsets(run);
            for (int64_t& offset : offsets) offset += begin;
            fn(offsets, run * length_ + begin, std::min(kTileElements, length_ - begin));
            return;
        }
        const int64_t end = std::min(runs_, (tile + 1) * runs_per_tile_);
        for (int64_t run = tile * runs_per_tile_; run < end; ++run) fn(run_offsets(run), run * length_, length_);
    }

    template <typename Fn>
    void for_each(int threads, const Fn& fn) const {
        for_tiles(tiles(), threads, [&](int64_t tile) { visit(tile, fn); });
    }

   private:
    std::array<int64_t, N> run_offsets(int64_t run) const {
        std::array<int64_t, N> offsets = {};
        for (int i = rank_ - 1; i >= 0; --i) {
            const int64_t index = i > 0 ? run % shape_[i] : run;
            for (int k = 0; k < N; ++k) offsets[k] += index * stride_[i][k];
            run /= shape_[i];
        }
        return offsets;
    }

    int rank_ = 0;  // of the dimensions outside the run
    int64_t shape_[kMaxRank] = {};
    std::array<int64_t, N> stride_[kMaxRank] = {};
    int64_t length_ = 0;         // elements of a run
    int64_t runs_ = 0;           //
    int64_t pieces_ = 1;         // tiles of a run that is longer than a tile
    int64_t runs_per_tile_ = 1;  //
};

}  // namespace surogate
