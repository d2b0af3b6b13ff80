// Float8 codes (e4m3, finite) as weights: bfloat16 has each of their numbers.
#pragma once

#include "simd.h"

namespace pdserve {
namespace {

constexpr float kLargestFp8 = 448.0f;

// The numbers of the codes in the lowest byte of each lane. None is a denormal of float32 on its
// way: threads that multiply by tiles take those for zeros.
PDSERVE_INLINE FloatLanes numbers_of_fp8(PairLanes codes) {
    const auto magnitude = (IntLanes)(codes & 0x7f);
    const auto denormal =
        (IntLanes)(__builtin_convertvector(magnitude, FloatLanes) * splat(0x1p-9f));
    const IntLanes normal = (magnitude << 20) + (120 << 23);
    const IntLanes bits = magnitude < 8 ? denormal : normal;
    return (FloatLanes)((PairLanes)bits | (codes & 0x80) << 24);
}

// The code of a number that is no larger than kLargestFp8, rounded to nearest, ties to even. Adding
// 1.5 * 2**23 rounds to an integer.
[[maybe_unused]] uint8_t fp8_code_of(float x) {
    const auto all = __builtin_bit_cast(uint32_t, x);
    const uint32_t bits = all & 0x7fffffffu;
    const auto magnitude = __builtin_bit_cast(float, bits);
    const uint32_t code = magnitude < 0x1p-6f
        ? static_cast<uint32_t>((magnitude * 512.0f + 12582912.0f) - 12582912.0f)
        : ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
    return static_cast<uint8_t>(code | (all >> 24 & 0x80));
}

}  // namespace
}  // namespace pdserve
