// bf16: the high half of an f32. Storage only; arithmetic is f32.
#pragma once

#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/tensor.h"

namespace surogate {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

// To nearest, ties to even. A NaN stays a (quiet) NaN.
inline bf16 narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return {static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded)};
}

// To one of the two neighbours, so that the mean over uniform `word`s is x: the word's high half is added to the bits
// that are cut off. Infinities and NaNs stay what they are.
inline bf16 narrow_stochastic(float x, uint32_t word) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + (word >> 16)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return {static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded)};
}

// Calls fn with a pointer to the data of a weight, of the type that it is stored in: const float* or const bf16*.
template <typename Fn>
void with_weights(const Tensor& w, Fn&& fn) {
    switch (w.dtype) {
        case DType::f32:
            return fn(static_cast<const float*>(w.data));
        case DType::bf16:
            return fn(static_cast<const bf16*>(w.data));
        default:
            throw std::invalid_argument(std::string("weights are f32 or bf16, not ") + name_of(w.dtype));
    }
}

}  // namespace surogate
