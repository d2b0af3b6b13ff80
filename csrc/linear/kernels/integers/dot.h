// The inner products of integers, 4 inputs of some outputs at a time, and how x is kept for them.
#pragma once

#include <cstddef>

#include "../read_codes.h"
#include "integers.h"

namespace pdserve::linear {
namespace {

#if defined(__AVX512VNNI__)

// A row's blocks of lower bytes and numbers; behind them all, upper bytes, which are zeros but in
// wide blocks: p = 256 * upper + lower, both signed.
constexpr bool kKeepsP = true;
constexpr int kLowerBytes = kBlockInputs;
constexpr int kUpperBytes = kBlockInputs;
constexpr int kLessCodes = 0;  // what is taken from codes before they are multiplied

// Inputs of a block, from i on.
PDSERVE_INLINE void put_integers(uint8_t* lower, uint8_t* upper, int i, IntLanes p) {
    store(upper + i, _mm512_cvtepi32_epi8((__m512i)((p + 128) >> 8)));
    store(lower + i, _mm512_cvtepi32_epi8((__m512i)p));  // as the upper one is the nearest
}

// Adds 4 inputs of a row, of unit u, times those of some outputs, to sums.
template <int kVectors>
PDSERVE_INLINE void add_four(IntLanes* sums, const PairLanes* codes, const uint8_t* x, int u) {
    if constexpr (kVectors == 1) {
        // In a register of its own, to be used but once, what is read would take twice as long, and
        // that is what GCC 12 does.
        const auto& inputs = *reinterpret_cast<const uint8_t(*)[4]>(x + 4 * u);
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[0]) : "v"(codes[0]), "m"(inputs));
    } else {
        uint32_t bits;
        __builtin_memcpy(&bits, x + 4 * u, sizeof(bits));
        const PairLanes inputs = splat(bits);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
            sums[i] = (IntLanes)_mm512_dpbusd_epi32(
                (__m512i)sums[i], (__m512i)codes[i], (__m512i)inputs);
        }
    }
}

#elif defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8)

// As above.
constexpr bool kKeepsP = true;
constexpr int kLowerBytes = kBlockInputs;
constexpr int kUpperBytes = kBlockInputs;

typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

PDSERVE_INLINE void put_integers(uint8_t* lower, uint8_t* upper, int i, IntLanes p) {
    store(upper + i, __builtin_convertvector((p + 128) >> 8, SignedBytes));
    store(lower + i, __builtin_convertvector(p << 24 >> 24, SignedBytes));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

constexpr int kLessCodes = 0;

PDSERVE_INLINE IntLanes dot(IntLanes sum, PairLanes codes, int8x16_t x) {
    return (IntLanes)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, x);
}

#else

// There are dot products of signed bytes only: codes are less by 128, and so is their zero.
constexpr int kLessCodes = 128;

PDSERVE_INLINE IntLanes dot(IntLanes sum, PairLanes codes, int8x16_t x) {
    return (IntLanes)vdotq_s32((int32x4_t)sum, (int8x16_t)(codes ^ 0x80808080u), x);
}

#endif

template <int kVectors>
PDSERVE_INLINE void add_four(IntLanes* sums, const PairLanes* codes, const uint8_t* x, int u) {
    int32_t bits;
    __builtin_memcpy(&bits, x + 4 * u, sizeof(bits));
    const auto inputs = (int8x16_t)vdupq_n_s32(bits);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) sums[i] = dot(sums[i], codes[i], inputs);
}

#else

// All 16 bits of q: of each 4 inputs, the even ones first, as they are multiplied in pairs.
constexpr bool kKeepsP = false;
constexpr int kLowerBytes = 2 * kBlockInputs;
constexpr int kUpperBytes = 0;
constexpr int kLessCodes = 0;

PDSERVE_INLINE void put_integers(uint8_t* block, uint8_t*, int first, IntLanes q) {
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) {
        const auto number = static_cast<int16_t>(q[lane]);
        const int i = first + lane, place = i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
        __builtin_memcpy(block + place * 2, &number, sizeof(number));
    }
}

PDSERVE_INLINE int32_t four_bytes(const uint8_t* start) {
    int32_t bytes;
    __builtin_memcpy(&bytes, start, sizeof(bytes));
    return bytes;
}

// The lower 16 bits of a and b, multiplied, and the upper ones, added up.
PDSERVE_INLINE IntLanes multiply_pairs(PairLanes a, int32_t b) {
#if defined(__AVX2__)
    return (IntLanes)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(b));
#elif defined(__SSE2__)
    return (IntLanes)_mm_madd_epi16((__m128i)a, _mm_set1_epi32(b));
#else
    const IntLanes lower = (IntLanes)(a & 0xffff) * static_cast<int16_t>(b);
    return lower + (IntLanes)(a >> 16) * (b >> 16);
#endif
}

// The compiler must not know that integers may be added up in another order: it would make trees of
// all sums of a block, of which hardly any would stay in a register.
PDSERVE_INLINE void keep_order([[maybe_unused]] IntLanes& sum) {
#if defined(__SSE2__)
    asm("" : "+x"(sum));
#endif
}

template <int kVectors>
PDSERVE_INLINE void add_four(IntLanes* sums, const PairLanes* codes, const uint8_t* x, int u) {
    const int32_t even = four_bytes(x + 8 * u), odd = four_bytes(x + 8 * u + 4);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
        sums[i] += multiply_pairs(codes[i] & 0x00ff00ffu, even);
        keep_order(sums[i]);
        sums[i] += multiply_pairs(codes[i] >> 8 & 0x00ff00ffu, odd);
        keep_order(sums[i]);
    }
}

#endif

constexpr int kLowerBlockBytes = kLowerBytes + static_cast<int>(sizeof(BlockNumbers));
static_assert(kLowerBlockBytes + kUpperBytes == kRowBlockBytes);

// A number of a row's block.
template <class T>
PDSERVE_INLINE T number_at(const uint8_t* block, size_t offset) {
    T number;
    __builtin_memcpy(&number, block + kLowerBytes + offset, sizeof(number));
    return number;
}

}  // namespace
}  // namespace pdserve::linear
