// quantize_fp8 and fp8_update_scales (surogate/ops/quantize_fp8.py).
#include <algorithm>
#include <stdexcept>

#include "core/formats.h"
#include "core/kernel.h"
#include "cpu/bf16.h"
#include "cpu/parallel.h"
#include "cpu/vec_math.h"
#include "cpu/workspace.h"

namespace surogate {
namespace {

using namespace formats;

template <typename T>
SUROGATE_INLINE uint32_t largest_of(const T* x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, bits_of(widen(x[i])) & kMagnitude);
    return most;
}
SUROGATE_SIMD uint32_t largest(const float* x, int64_t n) { return largest_of(x, n); }
SUROGATE_SIMD uint32_t largest(const bf16* x, int64_t n) { return largest_of(x, n); }

template <typename F, typename T>
SUROGATE_INLINE void encode_of(const T* x, float scale, uint8_t* q, int64_t n) {
    for (int64_t i = 0; i < n; ++i) q[i] = F::nearest(widen(x[i]) * scale);
}
SUROGATE_SIMD void encode(E4M3, const float* x, float scale, uint8_t* q, int64_t n) { encode_of<E4M3>(x, scale, q, n); }
SUROGATE_SIMD void encode(E4M3, const bf16* x, float scale, uint8_t* q, int64_t n) { encode_of<E4M3>(x, scale, q, n); }
SUROGATE_SIMD void encode(E5M2, const float* x, float scale, uint8_t* q, int64_t n) { encode_of<E5M2>(x, scale, q, n); }
SUROGATE_SIMD void encode(E5M2, const bf16* x, float scale, uint8_t* q, int64_t n) { encode_of<E5M2>(x, scale, q, n); }

template <typename F, typename T>
void quantize(const Call& call, const T* data) {
    const Tensor &x = call.in[0], &state = call.in[1], &given = call.in[2], &q = call.out[0];
    const int64_t rows = x.dim(0), width = x.dim(1);
    float* row = state.as<float>();
    float scale = row != nullptr ? row[kScale] : given ? *given.as<float>() : 0.f;
    if (row != nullptr || scale == 0.f) {
        auto* of_row = Workspace(call).take<uint32_t>(rows);
        for_rows(rows, width, call.threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) of_row[r] = largest(data + x.row_offset(r), width);
        });
        uint32_t most = 0;
        for (int64_t r = 0; r < rows; ++r) most = std::max(most, of_row[r]);
        if (row != nullptr) row[kAmax] = float_of(std::max(bits_of(row[kAmax]), most));
        if (scale == 0.f) scale = scale_for<F>(most);
    }
    for_rows(rows, width, call.threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            encode(F{}, data + x.row_offset(r), scale, q.as<uint8_t>() + q.row_offset(r), width);
        }
    });
    call.out[1].as<float>()[0] = scale;
    call.out[1].as<float>()[1] = 1.f / scale;
}

void quantize_fp8(const Call& call) {
    with_weights(call.in[0], [&](auto* data) {
        if (call.attrs.flag("e5m2")) {
            quantize<E5M2>(call, data);
        } else {
            quantize<E4M3>(call, data);
        }
    });
}

void fp8_update_scales(const Call& call) {
    const int64_t width = call.attrs.integer("width"), history = call.attrs.integer("history");
    const bool e5m2 = call.attrs.flag("e5m2");
    auto* states = call.out[0].as<float>();
    for (int64_t i = 0; i < call.out[0].numel() / width; ++i) {
        float* row = states + i * width;
        const float amax = row[kAmax];
        row[kAmax] = 0.f;
        if (bits_of(amax) < kInfinity) {
            const auto at = static_cast<int64_t>(row[kPosition]);
            row[kHistory + at] = amax;
            row[kPosition] = static_cast<float>((at + 1) % history);
        }
        const float most = *std::max_element(row + kHistory, row + kHistory + history);
        row[kScale] = most == 0.f ? 0.f : e5m2 ? scale_for<E5M2>(bits_of(most)) : scale_for<E4M3>(bits_of(most));
    }
}

SUROGATE_CPU_KERNEL("quantize_fp8", quantize_fp8);
SUROGATE_CPU_KERNEL("fp8_update_scales", fp8_update_scales);

}  // namespace
}  // namespace surogate
