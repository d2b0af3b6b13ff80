// The inner products of integers, 4 inputs of some outputs at a time, and how x is kept for them.
#pragma once

#include <cstddef>

#include "integers.h"
#include "read_codes.h"

namespace pdserve::linear {
namespace {

#if defined(__AVX512VNNI__)

// A plane of 32 bytes, then the other one, if there are two.
constexpr int integer_bytes(int num_planes) { return num_planes * kBlockInputs; }

// Inputs of a block, from i on.
template <int kPlanes>
PDSERVE_INLINE void put_integers(uint8_t* block, int i, IntLanes q) {
    const IntLanes upper = kPlanes == 1 ? q : (q + 128) >> 8;
    store(block + i, _mm512_cvtepi32_epi8((__m512i)upper));
    if constexpr (kPlanes == 2) {
        store(block + kBlockInputs + i, _mm512_cvtepi32_epi8((__m512i)(q - (upper << 8))));
    }
}

// sum + the codes times 4 inputs, in all lanes. (In a register of its own, to be used but once, what
// is read would take twice as long, and that is what GCC 12 does.)
PDSERVE_INLINE IntLanes add_four(IntLanes sum, PairLanes codes, const uint8_t* x) {
    const auto& inputs = *reinterpret_cast<const uint8_t(*)[4]>(x);
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(inputs));
    return sum;
}

// sum + the codes times inputs of half a block.
template <int kPlanes>
PDSERVE_INLINE IntLanes add_half(
    IntLanes sum, const CodeUnits& units, const uint8_t* block, int half) {
    const uint8_t* x = block + half * (kBlockInputs / 2);
    IntLanes upper = {};
#pragma GCC unroll 4
    for (int u = 0; u < kHalfUnits; ++u) upper = add_four(upper, units.of[u], x + 4 * u);
    if constexpr (kPlanes == 1) return upper + sum;
    IntLanes total = upper << 8;
#pragma GCC unroll 4
    for (int u = 0; u < kHalfUnits; ++u) {
        total = add_four(total, units.of[u], x + kBlockInputs + 4 * u);
    }
    return total + sum;
}

#else

// Integers of 16 bits: of each 4, the even ones first, as they are multiplied in pairs.
constexpr int integer_bytes(int) { return kBlockInputs * 2; }

template <int kPlanes>
PDSERVE_INLINE void put_integers(uint8_t* block, int first, IntLanes q) {
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

template <int kPlanes>
PDSERVE_INLINE IntLanes add_half(
    IntLanes sum, const CodeUnits& units, const uint8_t* block, int half) {
    const uint8_t* x = block + half * kBlockInputs;
#pragma GCC unroll 4
    for (int u = 0; u < kHalfUnits; ++u) {
        sum += multiply_pairs(units.of[u] & 0x00ff00ffu, four_bytes(x + 8 * u));
        sum += multiply_pairs(units.of[u] >> 8 & 0x00ff00ffu, four_bytes(x + 8 * u + 4));
    }
    return sum;
}

#endif

// Of a row.
constexpr int row_block_bytes(int num_planes) {
    return integer_bytes(num_planes) + static_cast<int>(sizeof(BlockNumbers));
}

// A number of a row's block, in all lanes.
template <class T>
PDSERVE_INLINE T number_at(const uint8_t* block, int num_planes, size_t offset) {
    T number;
    __builtin_memcpy(&number, block + integer_bytes(num_planes) + offset, sizeof(number));
    return number;
}

}  // namespace
}  // namespace pdserve::linear
