// Makes integers of rows of x; integers.h.
#pragma once

#include "dot.h"

namespace pdserve::linear {
namespace {

// Numbers whose largest is less are taken for zeros: their scale would have lost digits.
constexpr float kLeastScaled = 0x1p-100f;

constexpr int kHalfVectors = kHalfBlock / kLanes;
constexpr int kBlockVectors = 2 * kHalfVectors;

PDSERVE_INLINE int32_t largest_of(IntLanes lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)lanes);
#else
    int32_t largest = lanes[0];
    for (int i = 1; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
#endif
}

PDSERVE_INLINE int32_t sum_of(IntLanes lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)lanes);
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    return sum;
#endif
}

PDSERVE_INLINE void load_block(const BFloat16* row, int64_t first, int64_t num_in, FloatLanes* x) {
    const BFloat16* start = row + first;
    BFloat16 padded_end[kBlockInputs] = {};
    if (first + kBlockInputs > num_in) {
        __builtin_memcpy(padded_end, start, (num_in - first) * sizeof(BFloat16));
        start = padded_end;
    }
#pragma GCC unroll 8
    for (int v = 0; v < kBlockVectors; ++v) x[v] = load(start + v * kLanes);
}

// Of half a block. Magnitudes have the same order as their bits, with infinity and NaN at the end.
PDSERVE_INLINE int32_t largest_bits_of(const FloatLanes* x) {
    IntLanes magnitudes = {};
#pragma GCC unroll 4
    for (int v = 0; v < kHalfVectors; ++v) {
        const IntLanes bits = (IntLanes)x[v] & 0x7fffffff;
        magnitudes = bits > magnitudes ? bits : magnitudes;
    }
    return largest_of(magnitudes);
}

// Half of a block of x, whose largest magnitude is known. One of values that are not all finite has a
// scale that is not a number, and so has what it is multiplied by.
PDSERVE_INLINE void quantise_half(const FloatLanes* x, int half, int32_t largest_bits, int zero,
    uint8_t* lower, uint8_t* upper, BlockNumbers& numbers) {
    const float most = numbers.is_wide ? 32639.0f : 127.0f;
    const auto largest = __builtin_bit_cast(float, largest_bits);
    const bool is_finite = largest_bits < 0x7f800000;
    const bool is_scaled = is_finite && largest >= kLeastScaled;
    const float factor = is_scaled ? most / largest : 0.0f;
    const IntLanes kept = (is_finite ? -1 : 0) - IntLanes{};
    IntLanes sums = {};
#pragma GCC unroll 4
    for (int v = 0; v < kHalfVectors; ++v) {
        const auto finite = (FloatLanes)((IntLanes)x[v] & kept);
        // Adding 1.5 * 2**23 rounds to an integer, ties to even.
        const FloatLanes rounded = finite * splat(factor) + splat(12582912.0f);
        const IntLanes q = __builtin_convertvector(rounded - splat(12582912.0f), IntLanes);
        put_integers(lower, upper, half * kHalfBlock + v * kLanes, q);
        sums += q;
    }
    const int32_t sum = sum_of(sums);
    numbers.scales[half] = is_scaled ? largest / most : is_finite ? 0.0f : __builtin_nanf("");
    numbers.zero_sums[half] = -zero * sum;
    numbers.sums[half] = numbers.scales[half] * static_cast<float>(sum);
}

// The largest of each half: where its scale will be.
struct Largest {
    int32_t of[2];
    int32_t of_both() const { return of[0] > of[1] ? of[0] : of[1]; }
};

void quantise_row(const BFloat16* row, int64_t num_in, int64_t num_blocks, int zero, uint8_t* lower) {
    FloatLanes x[kBlockVectors];
    float sum = 0.0f;
    for (int64_t b = 0; b < num_blocks; ++b) {
        load_block(row, b * kBlockInputs, num_in, x);
        const Largest largest{{largest_bits_of(x), largest_bits_of(x + kHalfVectors)}};
        __builtin_memcpy(lower + b * kLowerBlockBytes + kLowerBytes, &largest, sizeof(largest));
        sum += __builtin_bit_cast(float, largest.of_both());
    }
    const float limit = kFarAbove * (sum / static_cast<float>(num_blocks));
    uint8_t* upper = lower + num_blocks * kLowerBlockBytes;
    for (int64_t b = 0; b < num_blocks; ++b, lower += kLowerBlockBytes, upper += kUpperBytes) {
        load_block(row, b * kBlockInputs, num_in, x);
        Largest largest;
        __builtin_memcpy(&largest, lower + kLowerBytes, sizeof(largest));
        BlockNumbers numbers;
        numbers.is_wide = __builtin_bit_cast(float, largest.of_both()) > limit;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            quantise_half(
                x + half * kHalfVectors, half, largest.of[half], zero, lower, upper, numbers);
        }
        numbers.sum = numbers.sums[0] + numbers.sums[1];
        __builtin_memcpy(lower + kLowerBytes, &numbers, sizeof(numbers));
    }
}

void quantise_rows(const Rows& rows, int64_t num_in, int64_t padded, int zero, void* target) {
    const int64_t num_blocks = padded / kBlockInputs;
    for (int64_t r = 0; r < rows.count; ++r) {
        quantise_row(static_cast<const BFloat16*>(rows.start) + r * rows.stride, num_in, num_blocks,
            zero, static_cast<uint8_t*>(target) + r * num_blocks * kRowBlockBytes);
    }
}

}  // namespace
}  // namespace pdserve::linear
