// Vectors of the widest kind that the translation unit is compiled for, with GCC's vector
// extensions: one source for AVX-512, AVX2 and all others (SSE2, NEON).
//
// Everything has internal linkage; see element.h for why.
#pragma once

#include <cstdint>

#include "element.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Whether the CPU multiplies pairs of bfloat16.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PDSERVE_HAS_PAIRS
#endif

namespace pdserve {
namespace {

#if defined(__AVX512F__) || defined(PDSERVE_TILES)  // where tiles are emulated, GCC splits vectors
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Of vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float FloatLanes __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t PairLanes __attribute__((vector_size(kLanes * 4)));  // lanes of two bfloat16
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * 2)));

#define PDSERVE_INLINE [[gnu::always_inline]] inline

template <class Lanes, class T>
PDSERVE_INLINE Lanes load_as(const T* source) {
    Lanes lanes;
    __builtin_memcpy(&lanes, source, sizeof(lanes));
    return lanes;
}

template <class Lanes, class T>
PDSERVE_INLINE void store(T* target, Lanes lanes) {
    __builtin_memcpy(target, &lanes, sizeof(lanes));
}

PDSERVE_INLINE FloatLanes load(const float* source) { return load_as<FloatLanes>(source); }
PDSERVE_INLINE PairLanes load(const uint32_t* source) { return load_as<PairLanes>(source); }

// A bfloat16 is the upper half of a float32. (Intrinsics, as GCC 12 widens in several steps.)
PDSERVE_INLINE FloatLanes load(const BFloat16* source) {
    const auto halves = load_as<HalfLanes>(source);
#if defined(__AVX512F__)
    const auto bits = (PairLanes)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
    const auto bits = (PairLanes)_mm256_cvtepu16_epi32((__m128i)halves);
#else
    const auto bits = __builtin_convertvector(halves, PairLanes);
#endif
    return (FloatLanes)(bits << 16);
}

PDSERVE_INLINE FloatLanes splat(float value) { return value - FloatLanes{}; }
PDSERVE_INLINE PairLanes splat(uint32_t value) { return value - PairLanes{}; }

// Compiled to a fused multiply-add wherever there is one (-ffp-contract=fast).
PDSERVE_INLINE FloatLanes multiply_add(FloatLanes sum, FloatLanes a, FloatLanes b) {
    return sum + a * b;
}

// What all lanes are multiplied by.
PDSERVE_INLINE FloatLanes factor_of(float value) { return splat(value); }

#if defined(PDSERVE_HAS_PAIRS)

// sum + a.low * b.low + a.high * b.high: exact products, summed in float32.
PDSERVE_INLINE FloatLanes multiply_add(FloatLanes sum, PairLanes a, PairLanes b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b));
#else
    return (FloatLanes)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)b, (bfloat16x8_t)a);
#endif
}

#if defined(__aarch64__)
struct PairFactor {
    bfloat16x4_t pair;  // in lane 0, where the instruction can take it from
};

PDSERVE_INLINE PairFactor factor_of(uint32_t value) {
    return {(bfloat16x4_t)vset_lane_u32(value, uint32x2_t{}, 0)};
}

PDSERVE_INLINE FloatLanes multiply_add(FloatLanes sum, PairFactor a, PairLanes b) {
    return (FloatLanes)vbfdotq_lane_f32((float32x4_t)sum, (bfloat16x8_t)b, a.pair, 0);
}
#else
PDSERVE_INLINE PairLanes factor_of(uint32_t value) { return splat(value); }
#endif

// For sums of pairs.
PDSERVE_INLINE PairLanes pairs_of_ones() {
    PairLanes ones = splat(uint32_t{0x3f803f80});
#if defined(__aarch64__)
    asm("" : "+w"(ones));  // GCC 12 would take the constant for one of float16
#endif
    return ones;
}

// The lanes of `low`, then those of `high`, rounded to bfloat16.
PDSERVE_INLINE PairLanes to_pairs(FloatLanes low, FloatLanes high) {
#if defined(__AVX512BF16__)
    return (PairLanes)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    const bfloat16x8_t lower = vcvtq_low_bf16_f32((float32x4_t)low);
    return (PairLanes)vcvtq_high_bf16_f32(lower, (float32x4_t)high);
#endif
}

#endif

// May drop a NaN. The softmax weight of that score is NaN nevertheless, and so is the result.
PDSERVE_INLINE FloatLanes max_of(FloatLanes a, FloatLanes b) { return a > b ? a : b; }

PDSERVE_INLINE float to_float(float value) { return value; }

// A float16, which is finite: its bits, moved to where float32 has them, are too small by 2**112.
PDSERVE_INLINE FloatLanes halves_to_float(PairLanes halves) {
    const auto magnitude = (FloatLanes)((halves & 0x7fff) << 13) * splat(0x1p112f);
    return (FloatLanes)((PairLanes)magnitude | (halves & 0x8000) << 16);
}

PDSERVE_INLINE float half_to_float(uint16_t half) {
    const uint32_t bits = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    const float magnitude = __builtin_bit_cast(float, bits) * 0x1p112f;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, magnitude) | sign);
}

PDSERVE_INLINE float to_float(BFloat16 value) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}

PDSERVE_INLINE void assign(float& target, float value) { target = value; }

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
PDSERVE_INLINE void assign(BFloat16& target, float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    target.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

// The same for all lanes. (The AVX-512 instruction treats denormals as zero; assign does not.)
PDSERVE_INLINE void store(BFloat16* target, FloatLanes lanes) {
#if defined(__AVX512BF16__)
    store(target, (__m256i)_mm512_cvtneps_pbh((__m512)lanes));
#elif defined(PDSERVE_HAS_PAIRS)
    store(target, vcvt_bf16_f32((float32x4_t)lanes));
#else
    const auto bits = (PairLanes)lanes;
    const PairLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const PairLanes halves = lanes != lanes ? splat(uint32_t{0x7fc0}) : rounded;
#if defined(__AVX512F__)
    store(target, _mm512_cvtepi32_epi16((__m512i)halves));
#elif defined(__AVX2__)
    const auto in_both = _mm256_packus_epi32((__m256i)halves, (__m256i)halves);
    store(target, _mm256_castsi256_si128(_mm256_permute4x64_epi64(in_both, 0x08)));
#else
    store(target, __builtin_convertvector(halves, HalfLanes));
#endif
#endif
}

// 2**x for x <= 0, to about one unit in the last place; exactly 1 at 0 and exactly 0 below -126.5;
// NaN stays NaN. Written out so that every lane, row and tile gets the same rounding.
PDSERVE_INLINE FloatLanes exp2_of_nonpositive(FloatLanes x) {
    const FloatLanes lowest = splat(-127.0f);
    const FloatLanes clamped = x < lowest ? lowest : x;
    // Adding 1.5 * 2**23 rounds to an integer, which then stands in the low bits.
    const FloatLanes shifted = clamped + splat(12582912.0f);
    const FloatLanes fraction = clamped - (shifted - splat(12582912.0f));  // in [-0.5, 0.5]
    const IntLanes exponent = (IntLanes)shifted + 127;
    const FloatLanes power = (FloatLanes)(exponent << 23);
    FloatLanes p = splat(1.535336188319500e-4f);
    p = multiply_add(splat(1.339887440266574e-3f), p, fraction);
    p = multiply_add(splat(9.618437357674640e-3f), p, fraction);
    p = multiply_add(splat(5.550332471162809e-2f), p, fraction);
    p = multiply_add(splat(2.402264791363012e-1f), p, fraction);
    p = multiply_add(splat(6.931472028550421e-1f), p, fraction);
    p = multiply_add(splat(1.0f), p, fraction);
    return p * power;
}

PDSERVE_INLINE float largest_of(FloatLanes lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)lanes);
#else
    float values[kLanes];
    store(values, lanes);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) {
            values[i] = values[i] > values[i + half] ? values[i] : values[i + half];
        }
    }
    return values[0];
#endif
}

// Adds the halves of the vector, then their halves, and so on: always in the same order.
PDSERVE_INLINE float sum_of(FloatLanes lanes) {
    float values[kLanes];
    store(values, lanes);
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) values[i] += values[i + half];
    }
    return values[0];
}

// Prefetches the cache lines of `num_bytes` bytes into the L2 cache; the address need not be valid.
// The L1 cache can have so few misses in flight that prefetching into it stalls (measured: 7
// instead of 12 GB/s).
PDSERVE_INLINE void prefetch(const void* start, int num_bytes) {
    for (int offset = 0; offset < num_bytes; offset += 64) {
        __builtin_prefetch(static_cast<const char*>(start) + offset, 0, 2);
    }
}

}  // namespace
}  // namespace pdserve
