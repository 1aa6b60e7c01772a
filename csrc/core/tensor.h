// Tensor: a typed, strided view of arena memory. It owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace surogate {

enum class DType : uint8_t { f32, f64, bf16, i32, i64, u8 };

inline size_t size_of(DType t) {
    switch (t) {
        case DType::f64:
        case DType::i64:
            return 8;
        case DType::f32:
        case DType::i32:
            return 4;
        case DType::bf16:
            return 2;
        case DType::u8:
            return 1;
    }
    return 0;
}

DType parse_dtype(std::string_view name);
const char* name_of(DType t);

enum class Space : uint8_t { device, pinned, host };
constexpr int kSpaces = 3;

constexpr int kMaxRank = 4;

struct Tensor {
    void* data = nullptr;  // null: an optional operand that was left out
    DType dtype = DType::f32;
    int rank = 0;
    int64_t shape[kMaxRank] = {};
    int64_t stride[kMaxRank] = {};  // in elements; stride[rank-1] == 1

    explicit operator bool() const { return data != nullptr; }

    template <typename T>
    T* as() const {
        return static_cast<T*>(data);
    }
    int64_t dim(int i) const { return shape[i < 0 ? rank + i : i]; }
    int64_t numel() const {
        int64_t n = 1;
        for (int i = 0; i < rank; ++i) n *= shape[i];
        return n;
    }
    // Product of all dimensions but the last.
    int64_t rows() const { return rank == 0 ? 1 : numel() / (shape[rank - 1] ? shape[rank - 1] : 1); }
    // Element offset of row r, where rows count over all dimensions but the last.
    int64_t row_offset(int64_t r) const {
        int64_t off = 0;
        for (int i = rank - 2; i >= 0; --i) {
            off += (r % shape[i]) * stride[i];
            r /= shape[i];
        }
        return off;
    }
    bool contiguous() const {
        int64_t expect = 1;
        for (int i = rank - 1; i >= 0; --i) {
            if (shape[i] != 1 && stride[i] != expect) return false;
            expect *= shape[i];
        }
        return true;
    }
};

}  // namespace surogate
