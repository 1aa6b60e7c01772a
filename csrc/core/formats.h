// Narrow floating formats: E4M3 and E5M2 (Micikevicius et al. 2022, "FP8 formats for deep learning") and E2M1 (OCP
// Microscaling specification 1.0). surogate/ops/formats.py is the reference. For host and device.
//
// Values beyond the largest are stored as it, infinities too, as the hardware's saturating conversions do. A NaN stays
// a NaN; E2M1, which has none, stores its largest value.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SUROGATE_FORMATS_BOTH __host__ __device__ inline
#else
#define SUROGATE_FORMATS_BOTH inline
#endif

namespace surogate::formats {

SUROGATE_FORMATS_BOTH uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
SUROGATE_FORMATS_BOTH float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Magnitudes as bits keep the order of floats, and a NaN is above all: largest values are found by them.
constexpr uint32_t kMagnitude = 0x7FFFFFFFu, kInfinity = 0x7F800000u;

// `sign` is the highest bit of a code, `largest` the code of the largest finite value.
template <int mantissa, int bias, uint32_t sign, uint32_t largest, uint32_t nan>
struct Format {
    static constexpr int kMantissa = mantissa, kBias = bias, kLeast = 1 - bias;  // exponent of the smallest normal
    static constexpr uint32_t kSign = sign, kLargest = largest, kNan = nan;

    // To the nearest value, ties to even.
    static SUROGATE_FORMATS_BOTH uint8_t nearest(float x) {
        const uint32_t bits = bits_of(x);
        const uint32_t most = bits_of(decode(static_cast<uint8_t>(kLargest)));
        uint32_t magnitude = bits & kMagnitude;
        const bool is_nan = magnitude > kInfinity;
        magnitude = magnitude < most ? magnitude : most;
        constexpr uint32_t kFloor = static_cast<uint32_t>(kLeast + 127) << 23;
        const uint32_t exponent = (magnitude < kFloor ? kFloor : magnitude) & kInfinity;
        // Beside a number 2^(23 - mantissa) as large, an f32 has just the digits that are kept.
        const uint32_t anchor = exponent + (static_cast<uint32_t>(23 - kMantissa) << 23);
        const uint32_t digits = bits_of(float_of(magnitude) + float_of(anchor)) - anchor;
        const uint32_t code = (((exponent - kFloor) >> 23) << kMantissa) + digits;
        return static_cast<uint8_t>(is_nan ? kNan : code | ((bits >> 31) != 0 ? kSign : 0u));
    }

    // To one of the two neighbours, so that the mean over uniform `word`s is x (up to 2^-32 of their distance).
    static SUROGATE_FORMATS_BOTH uint8_t stochastic(float x, uint32_t word) {
        const uint32_t bits = bits_of(x), magnitude = bits & kMagnitude;
        if (magnitude > kInfinity) return static_cast<uint8_t>(kNan);
        const int field = static_cast<int>(magnitude >> 23);
        const uint32_t significand = (magnitude & 0x7FFFFFu) | (field > 0 ? 0x800000u : 0u);
        const int exponent = (field > 0 ? field : 1) - 127;
        const int kept = exponent > kLeast ? exponent : kLeast;
        const int cut = 23 - kMantissa + kept - exponent;  // bits below the last digit
        uint64_t fixed = significand;                      // digits, with 32 bits behind the point
        if (cut <= 32) {
            fixed <<= 32 - cut;
        } else {
            fixed >>= cut - 32 < 63 ? cut - 32 : 63;
        }
        const auto digits = static_cast<uint32_t>((fixed + word) >> 32);
        uint32_t code = (static_cast<uint32_t>(kept - kLeast) << kMantissa) + digits;
        code = code < kLargest ? code : kLargest;
        return static_cast<uint8_t>(code | ((bits >> 31) != 0 ? kSign : 0u));
    }

    static SUROGATE_FORMATS_BOTH float decode(uint8_t code) {
        const uint32_t magnitude = code & (kSign - 1);
        const float negative = (code & kSign) != 0 ? -1.f : 1.f;
        if (kNan > kLargest && magnitude > kLargest) {
            // E5M2 alone has infinities.
            const bool infinite = kMantissa == 2 && magnitude == kLargest + 1;
            return float_of(infinite ? (bits_of(negative) & ~kMagnitude) | kInfinity : 0x7FC00000u);
        }
        if ((magnitude >> kMantissa) == 0) {
            constexpr uint32_t kUnit = static_cast<uint32_t>(kLeast - kMantissa + 127) << 23;
            return negative * static_cast<float>(magnitude) * float_of(kUnit);
        }
        return negative * float_of((magnitude << (23 - kMantissa)) + (static_cast<uint32_t>(127 - kBias) << 23));
    }
};

using E4M3 = Format<3, 7, 0x80u, 0x7Eu, 0x7Fu>;   // to 448
using E5M2 = Format<2, 15, 0x80u, 0x7Bu, 0x7Fu>;  // to 57344
using E2M1 = Format<1, 1, 0x8u, 0x7u, 0x7u>;      // to 6

// The largest power of two that takes a tensor with this largest magnitude (as bits) into the format. 1 where the
// magnitude is zero or not finite.
template <typename F>
SUROGATE_FORMATS_BOTH float scale_for(uint32_t magnitude) {
    if (magnitude == 0 || magnitude >= kInfinity) return 1.f;
    const uint32_t most = bits_of(F::decode(static_cast<uint8_t>(F::kLargest)));
    int power = static_cast<int>(most >> 23) - static_cast<int>(magnitude >> 23);
    if ((magnitude & 0x7FFFFFu) > (most & 0x7FFFFFu)) --power;
    power = power < 100 ? power : 100;
    return float_of(static_cast<uint32_t>(power + 127) << 23);
}

// The state of a tensor with delayed scaling: a row of f32.
constexpr int kScale = 0, kAmax = 1, kPosition = 2, kHistory = 4;

}  // namespace surogate::formats
