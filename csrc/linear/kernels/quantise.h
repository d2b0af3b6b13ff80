// Makes integers of rows of x; integers.h.
#pragma once

#include "dot.h"

namespace pdserve::linear {
namespace {

// Numbers whose largest is less are taken for zeros: their scale would have lost digits.
constexpr float kLeastScaled = 0x1p-100f;

constexpr int kSharing = kBlockInputs / 2;  // inputs with one scale

// Half of a block, of x. One of values that are not all finite has a scale that is not a number,
// and so has what it is multiplied by.
template <int kPlanes>
PDSERVE_INLINE void quantise_half(
    const float* x, int half, int zero, uint8_t* block, BlockNumbers& numbers) {
    constexpr float kLargest = kPlanes == 1 ? 127.0f : 32639.0f;
    // Magnitudes have the same order as their bits, with infinity and NaN at the end.
    int32_t largest_bits = 0;
    for (int i = 0; i < kSharing; ++i) {
        const int32_t bits = __builtin_bit_cast(int32_t, x[i]) & 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    const auto largest = __builtin_bit_cast(float, largest_bits);
    const bool is_finite = largest_bits < 0x7f800000;
    const bool is_scaled = is_finite && largest >= kLeastScaled;
    const float factor = is_scaled ? kLargest / largest : 0.0f;
    int32_t q[kSharing];
    int32_t sum = 0;
    for (int i = 0; i < kSharing; ++i) {
        // Adding 1.5 * 2**23 rounds to an integer, ties to even.
        const float scaled = is_finite ? x[i] * factor : 0.0f;
        q[i] = static_cast<int32_t>((scaled + 12582912.0f) - 12582912.0f);
        sum += q[i];
    }
    for (int i = 0; i < kSharing; ++i) put_integer<kPlanes>(block, half * kSharing + i, q[i]);
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
            float x[kBlockInputs] = {};
            if (first + kBlockInputs <= num_in) {
                for (int i = 0; i < kBlockInputs; i += kLanes) store(x + i, load(from + first + i));
            } else {
                for (int64_t i = first; i < num_in; ++i) x[i - first] = to_float(from[i]);
            }
            BlockNumbers numbers = {};
            quantise_half<kPlanes>(x, 0, zero, block, numbers);
            quantise_half<kPlanes>(x + kSharing, 1, zero, block, numbers);
            numbers.sum = numbers.sums[0] + numbers.sums[1];
            __builtin_memcpy(block + integer_bytes(kPlanes), &numbers, sizeof(numbers));
            block += row_block_bytes(kPlanes);
        }
    }
}

}  // namespace
}  // namespace pdserve::linear
