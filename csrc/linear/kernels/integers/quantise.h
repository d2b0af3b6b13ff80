// Makes integers of rows of x; integers.h.
#pragma once

#include "../read_codes.h"
#include "integers.h"

namespace pdserve::linear {
namespace {

// Numbers whose largest is less are taken for zeros: their scale would have lost digits.
constexpr float kLeastScaled = 0x1p-100f;

constexpr int kHalfVectors = kHalfBlock / kLanes;

PDSERVE_INLINE int32_t sum_of(IntLanes lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)lanes);
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    return sum;
#endif
}

// A block of a row, padded with zeros.
class Block {
public:
    PDSERVE_INLINE Block(const BFloat16* row, int64_t first, int64_t num_in) : start_(row + first) {
        if (first + kBlockInputs <= num_in) return;
        __builtin_memset(padded_, 0, sizeof(padded_));
        __builtin_memcpy(padded_, start_, (num_in - first) * sizeof(BFloat16));
        start_ = padded_;
    }

    PDSERVE_INLINE FloatLanes at(int i) const { return load(start_ + i); }
    PDSERVE_INLINE const BFloat16* start() const { return start_; }

private:
    const BFloat16* start_;
    BFloat16 padded_[kBlockInputs];
};

// The bits of the largest magnitude of each half of a block. Magnitudes have the same order as their
// bits, with infinity and NaN at the end.
struct Largest {
    int32_t of[2];

    PDSERVE_INLINE explicit Largest(const Block& block) {
#if defined(__AVX512F__)
        __m512i v = _mm512_and_si512(
            _mm512_loadu_si512(block.start()), _mm512_set1_epi16(0x7fff));
        v = _mm512_max_epu16(v, _mm512_shuffle_i64x2(v, v, 0xb1));
        v = _mm512_max_epu16(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
        v = _mm512_max_epu16(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
        v = _mm512_max_epu16(v, _mm512_rol_epi32(v, 16));
        of[0] = _mm512_cvtsi512_si32(v) << 16;
        of[1] = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(v, 2)) << 16;
#else
        for (int half = 0; half < 2; ++half) {
            of[half] = 0;
            for (int i = 0; i < kHalfBlock; ++i) {
                const int32_t bits = block.start()[half * kHalfBlock + i].bits & 0x7fff;
                of[half] = bits > of[half] ? bits : of[half];
            }
            of[half] <<= 16;
        }
#endif
    }
    int32_t of_both() const { return of[0] > of[1] ? of[0] : of[1]; }
};

// What a row's largest magnitude makes of it.
struct RowScale {
    explicit RowScale(int32_t largest_bits) {
        const auto largest = __builtin_bit_cast(float, largest_bits);
        is_finite = largest_bits < 0x7f800000;
        const bool is_scaled = is_finite && largest >= kLeastScaled;
        scale = is_scaled ? largest / kMostQ : is_finite ? 0.0f : __builtin_nanf("");
        factor = is_scaled ? kMostQ / largest : 0.0f;
        multiplier_factor = is_scaled ? (kMostQ / kMostP) / largest : 0.0f;
    }

    bool is_finite;  // else all products are no numbers
    float scale;
    float factor;
    float multiplier_factor;
};

struct RowLargest {
    int32_t of_all = 0;
    float limit = 0.0f;  // blocks with more are wide
};

// Calls keep(b, Largest) for each block.
template <class Keep>
PDSERVE_INLINE RowLargest largest_of_row(
    const BFloat16* row, int64_t num_in, int64_t num_blocks, const Keep& keep) {
    RowLargest found;
    float sum = 0.0f;
    for (int64_t b = 0; b < num_blocks; ++b) {
        const Largest largest(Block(row, b * kBlockInputs, num_in));
        keep(b, largest);
        const int32_t of_both = largest.of_both();
        found.of_all = of_both > found.of_all ? of_both : found.of_all;
        sum += __builtin_bit_cast(float, of_both);
    }
    found.limit = kFarAbove * (sum / static_cast<float>(num_blocks));
    return found;
}

constexpr int kBlocksTogether = 8;
constexpr int kHalvesTogether = 2 * kBlocksTogether;

// What becomes of some blocks.
struct HalfFactors {
    bool is_wide[kBlocksTogether];
    alignas(64) int32_t multipliers[kHalvesTogether];
    alignas(64) float factors[kHalvesTogether];  // p is the nearest integer to x times this

    // `largest`: of each half.
    HalfFactors(const RowScale& scale, float limit, const float* largest) {
        int32_t wide[kHalvesTogether];
        for (int b = 0; b < kBlocksTogether; ++b) {
            is_wide[b] = largest[2 * b] > limit || largest[2 * b + 1] > limit;
            wide[2 * b] = wide[2 * b + 1] = is_wide[b] ? -1 : 0;
        }
        for (int i = 0; i < kHalvesTogether; i += kLanes) {
            // The least with which no input has more than kMostP.
            const FloatLanes exact = load(largest + i) * splat(scale.multiplier_factor);
            const auto below = __builtin_convertvector(exact, IntLanes);
            IntLanes least = below - (__builtin_convertvector(below, FloatLanes) < exact);
            const IntLanes most = kMostQ / kMostP - IntLanes{}, one = 1 - IntLanes{};
            least = least > most ? most : least;
            least = least < one || load_as<IntLanes>(wide + i) != 0 ? one : least;
            store(multipliers + i, least);
            store(factors + i, splat(scale.factor) / __builtin_convertvector(least, FloatLanes));
        }
    }
};

// The nearest integers to x times a factor, ties to even; 0 for all of a row that is not finite.
PDSERVE_INLINE IntLanes rounded_integers(FloatLanes x, float factor, IntLanes kept) {
    // Adding 1.5 * 2**23 leaves no room for fractions.
    const FloatLanes magic = splat(12582912.0f);
    return (IntLanes)((FloatLanes)((IntLanes)x & kept) * splat(factor) + magic) - (IntLanes)magic;
}

// Calls put(b, i, p, factors, its half among these) for the vectors of inputs i of a row's blocks b,
// in ascending order. largest_of(b): where the two numbers are that largest_of_row found.
template <class LargestOf, class Put>
PDSERVE_INLINE void quantise_blocks(const BFloat16* row, int64_t num_in, int64_t num_blocks,
    const RowScale& scale, float limit, const LargestOf& largest_of, const Put& put) {
    const IntLanes kept = (scale.is_finite ? -1 : 0) - IntLanes{};
    for (int64_t first = 0; first < num_blocks; first += kBlocksTogether) {
        const int64_t left = num_blocks - first;
        const int count = left < kBlocksTogether ? static_cast<int>(left) : kBlocksTogether;
        alignas(64) float largest[kHalvesTogether] = {};
        for (int b = 0; b < count; ++b) {
            __builtin_memcpy(largest + 2 * b, largest_of(first + b), sizeof(Largest));
        }
        const HalfFactors factors(scale, limit, largest);
        for (int b = 0; b < count; ++b) {
            const Block block(row, (first + b) * kBlockInputs, num_in);
#pragma GCC unroll 8
            for (int i = 0; i < kBlockInputs; i += kLanes) {
                const int half = i / kHalfBlock;
                put(first + b, i, rounded_integers(block.at(i), factors.factors[2 * b + half], kept),
                    factors, 2 * b + half);
            }
        }
    }
}

}  // namespace
}  // namespace pdserve::linear
