// Codes of float8 to bfloat16 by tables of bytes (AVX512-VBMI): a code without its sign has 7 bits,
// which are the index of the two bytes of its number. The sign is the highest bit of both.
#pragma once

#include "store/stored_rows.h"

namespace pdserve::attention {
namespace {

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PDSERVE_HAS_CODE_TABLES

// The bytes of the numbers 0 to 127, as codes that are not negative.
struct CodeTables {
    alignas(64) uint8_t low[128];
    alignas(64) uint8_t high[128];
};

constexpr uint16_t bfloat16_bits(float exact) {
    return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, exact) >> 16);
}

constexpr float number_of(int code) {
    const int exponent = code >> 3;
    float number = static_cast<float>(exponent == 0 ? code : 8 + code % 8) * 0x1p-9f;
    for (int i = 1; i < exponent; ++i) number *= 2;
    return number;
}

constexpr CodeTables make_code_tables() {
    CodeTables tables{};
    for (int code = 0; code < 128; ++code) {
        const uint16_t bits = bfloat16_bits(number_of(code));
        tables.low[code] = static_cast<uint8_t>(bits);
        tables.high[code] = static_cast<uint8_t>(bits >> 8);
    }
    return tables;
}

constexpr CodeTables kCodeTables = make_code_tables();

// 64 codes as bfloat16, in two vectors: of each 128 bits of codes the first 8, and the others.
PDSERVE_INLINE void decode_to_halves(__m512i codes, __m512i (&halves)[2]) {
    const auto look_up = [](const uint8_t* table, __m512i index) {
        return _mm512_permutex2var_epi8(
            _mm512_load_si512(table), index, _mm512_load_si512(table + 64));
    };
    const __m512i low = look_up(kCodeTables.low, codes);
    // high | (codes & sign)
    const __m512i high = _mm512_ternarylogic_epi32(
        look_up(kCodeTables.high, codes), codes, _mm512_set1_epi8(-128), 0xf8);
    halves[0] = _mm512_unpacklo_epi8(low, high);
    halves[1] = _mm512_unpackhi_epi8(low, high);
}

// Which bytes of two rows stand where, so that what is decoded is pairs of 16 columns each, in
// order: of each 128 bits, 4 columns of the first 16, and 4 of the next.
struct PairOrder {
    alignas(64) uint8_t bytes[2][64];
};

constexpr PairOrder make_pair_order() {
    PairOrder order{};
    for (int at = 0; at < 128; ++at) {
        const int lane = at % 64 / 16, pair = at % 8 / 2, group = at / 64 * 2 + at % 16 / 8;
        const int column = 16 * group + 4 * lane + pair;
        order.bytes[at / 64][at % 64] = static_cast<uint8_t>(column + at % 2 * 64);
    }
    return order;
}

constexpr PairOrder kPairOrder = make_pair_order();

// Columns of two rows as pairs (low row, high row): 16 columns in each of 2 or 4 vectors.
template <int C>
PDSERVE_INLINE void decode_pairs(const Fp8* low, const Fp8* high, PairLanes (&pairs)[C]) {
    static_assert(C == 2 || C == 4);
    const auto row = [](const Fp8* start) {
        if constexpr (C == 4) return _mm512_loadu_si512(start);
        return _mm512_castsi256_si512(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start)));
    };
    const __m512i a = row(low), b = row(high);
#pragma GCC unroll 2
    for (int i = 0; i < C / 2; ++i) {
        const __m512i order = _mm512_load_si512(kPairOrder.bytes[i]);
        __m512i halves[2];
        decode_to_halves(_mm512_permutex2var_epi8(a, order, b), halves);
        pairs[2 * i] = (PairLanes)halves[0];
        pairs[2 * i + 1] = (PairLanes)halves[1];
    }
}

#endif

}  // namespace
}  // namespace pdserve::attention
