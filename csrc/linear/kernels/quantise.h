// Makes integers of rows of x; integers.h.
#pragma once

#include "dot.h"

namespace pdserve::linear {
namespace {

// Numbers whose largest is less are taken for zeros: their scale would have lost digits.
constexpr float kLeastScaled = 0x1p-100f;

constexpr int kSharing = kBlockInputs / 2;  // inputs with one scale

constexpr int kHalfVectors = kSharing / kLanes;

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

// Half of a block, of x. One of values that are not all finite has a scale that is not a number,
// and so has what it is multiplied by.
template <int kPlanes>
PDSERVE_INLINE void quantise_half(
    const FloatLanes* x, int half, int zero, uint8_t* block, BlockNumbers& numbers) {
    constexpr float kLargest = kPlanes == 1 ? 127.0f : 32639.0f;
    // Magnitudes have the same order as their bits, with infinity and NaN at the end.
    IntLanes magnitudes = {};
#pragma GCC unroll 4
    for (int v = 0; v < kHalfVectors; ++v) {
        const IntLanes bits = (IntLanes)x[v] & 0x7fffffff;
        magnitudes = bits > magnitudes ? bits : magnitudes;
    }
    const int32_t largest_bits = largest_of(magnitudes);
    const auto largest = __builtin_bit_cast(float, largest_bits);
    const bool is_finite = largest_bits < 0x7f800000;
    const bool is_scaled = is_finite && largest >= kLeastScaled;
    const float factor = is_scaled ? kLargest / largest : 0.0f;
    const IntLanes kept = (is_finite ? -1 : 0) - IntLanes{};
    IntLanes sums = {};
#pragma GCC unroll 4
    for (int v = 0; v < kHalfVectors; ++v) {
        const auto finite = (FloatLanes)((IntLanes)x[v] & kept);
        // Adding 1.5 * 2**23 rounds to an integer, ties to even.
        const FloatLanes rounded = finite * splat(factor) + splat(12582912.0f);
        const IntLanes q = __builtin_convertvector(rounded - splat(12582912.0f), IntLanes);
        put_integers<kPlanes>(block, half * kSharing + v * kLanes, q);
        sums += q;
    }
    const int32_t sum = sum_of(sums);
    const float scale = is_scaled ? largest / kLargest : 0.0f;
    numbers.scales[half] = is_finite ? scale : __builtin_nanf("");
    numbers.zero_sums[half] = -zero * sum;
    numbers.sums[half] = numbers.scales[half] * static_cast<float>(sum);
}

template <int kPlanes>
void quantise_rows(const Rows& rows, int64_t num_in, int64_t padded, int zero, void* target) {
    auto* block = static_cast<uint8_t*>(target);
    for (int64_t r = 0; r < rows.count; ++r) {
        const auto* from = static_cast<const BFloat16*>(rows.start) + r * rows.stride;
        for (int64_t first = 0; first < padded; first += kBlockInputs) {
            FloatLanes x[2 * kHalfVectors];
            const BFloat16* start = from + first;
            BFloat16 padded_end[kBlockInputs] = {};
            if (first + kBlockInputs > num_in) {
                const int64_t left = num_in - first;
                __builtin_memcpy(padded_end, start, left * sizeof(BFloat16));
                start = padded_end;
            }
#pragma GCC unroll 8
            for (int v = 0; v < 2 * kHalfVectors; ++v) x[v] = load(start + v * kLanes);
            BlockNumbers numbers = {};
            quantise_half<kPlanes>(x, 0, zero, block, numbers);
            quantise_half<kPlanes>(x + kHalfVectors, 1, zero, block, numbers);
            numbers.sum = numbers.sums[0] + numbers.sums[1];
            __builtin_memcpy(block + integer_bytes(kPlanes), &numbers, sizeof(numbers));
            block += row_block_bytes(kPlanes);
        }
    }
}

}  // namespace
}  // namespace pdserve::linear
