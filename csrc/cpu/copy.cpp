// fill: one value everywhere. copy: the same values in another layout, dtype or space.
#include <cstring>
#include <stdexcept>

#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"

namespace surogate {

namespace {

template <typename To, typename From>
To convert(From x) {
    if constexpr (std::is_same_v<To, bf16>) {
        return narrow(static_cast<float>(widen(static_cast<float>(x))));
    } else {
        return static_cast<To>(x);
    }
}
template <>
float convert(bf16 x) {
    return widen(x);
}
template <>
double convert(bf16 x) {
    return widen(x);
}
template <>
bf16 convert(bf16 x) {
    return x;
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
            held = narrow(static_cast<float>(value));
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
    if (x.numel() != y.numel() || x.rank != y.rank) throw std::invalid_argument("copy between different shapes");
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
