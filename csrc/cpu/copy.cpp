// fill: one value everywhere. copy: the same values in another layout, dtype or space.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"

namespace surogate {

namespace {

// To nearest, ties to even. By way of f32 rounded to odd, so that what lay just beside a tie is not taken for one.
bf16 narrow_double(double x) {
    const auto nearest = static_cast<float>(x);
    if (static_cast<double>(nearest) == x) return narrow(nearest);
    uint32_t bits = std::bit_cast<uint32_t>(nearest);
    if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) --bits;  // towards zero
    return narrow(std::bit_cast<float>(bits | 1u));
}

template <typename To, typename From>
To convert(From x) {
    if constexpr (std::is_same_v<To, bf16> && std::is_same_v<From, double>) {
        return narrow_double(x);
    } else if constexpr (std::is_same_v<To, bf16>) {
        return narrow(widen(x));
    } else if constexpr (std::is_same_v<From, bf16>) {
        return static_cast<To>(widen(x));
    } else {
        return static_cast<To>(x);
    }
}

// Calls fn with a value of the C++ type of a dtype.
template <typename Fn>
void with_type(DType dtype, const Fn& fn) {
    switch (dtype) {
        case DType::f32:
            return fn(float{});
        case DType::f64:
            return fn(double{});
        case DType::bf16:
            return fn(bf16{});
        case DType::i32:
            return fn(int32_t{});
        case DType::i64:
            return fn(int64_t{});
        case DType::u8:
            return fn(uint8_t{});
    }
}

void fill(const Call& call) {
    const Tensor& y = call.out[0];
    const double value = call.attrs.real("value");
    const int64_t width = y.rank == 0 ? 1 : y.dim(-1);
    const RowOffsets offsets(y);
    with_type(y.dtype, [&](auto kind) {
        using T = decltype(kind);
        T held;
        if constexpr (std::is_same_v<T, bf16>) {
            held = narrow_double(value);
        } else {
            held = static_cast<T>(value);
        }
        for_rows(y.rows(), width, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                std::fill_n(y.as<T>() + offsets[row], width, held);
            }
        });
    });
}

void copy(const Call& call) {
    const Tensor &x = call.in[0], &y = call.out[0];
    if (x.rank != y.rank || !std::equal(x.shape, x.shape + x.rank, y.shape)) {
        throw std::invalid_argument("copy between different shapes");
    }
    const int64_t width = x.rank == 0 ? 1 : x.dim(-1);
    const RowOffsets from(x), to(y);
    const bool floating_x = x.dtype == DType::f32 || x.dtype == DType::f64 || x.dtype == DType::bf16;
    const bool floating_y = y.dtype == DType::f32 || y.dtype == DType::f64 || y.dtype == DType::bf16;
    if (x.dtype == y.dtype) {
        const auto size = static_cast<int64_t>(size_of(x.dtype));
        for_rows(x.rows(), width, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                std::memcpy(y.as<char>() + to[row] * size, x.as<char>() + from[row] * size,
                            static_cast<size_t>(width * size));
            }
        });
        return;
    }
    if (!floating_x || !floating_y) throw std::invalid_argument("copy converts between floating dtypes only");
    with_type(x.dtype, [&](auto source) {
        with_type(y.dtype, [&](auto target) {
            using From = decltype(source);
            using To = decltype(target);
            if constexpr (std::is_integral_v<From> || std::is_integral_v<To>) {
                return;  // refused above
            } else {
                for_rows(x.rows(), width, call.threads, [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                        const From* in = x.as<From>() + from[row];
                        To* out = y.as<To>() + to[row];
                        for (int64_t i = 0; i < width; ++i) out[i] = convert<To>(in[i]);
                    }
                });
            }
        });
    });
}

SUROGATE_CPU_KERNEL("fill", fill);
SUROGATE_CPU_KERNEL("copy", copy);

}  // namespace

}  // namespace surogate
