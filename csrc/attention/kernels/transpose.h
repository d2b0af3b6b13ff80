// Transposes 16 rows of 16 units of 32 bits (a float32, or two bfloat16) of keys. A score is a sum
// over head_dim; with one key per lane it needs no sum across lanes.
#pragma once

#include "../../isa/simd.h"

namespace pdserve::attention {
namespace {

constexpr int kTransposeSize = 16;

#if defined(__AVX512F__)

// out[u * out_stride + r] = rows[r][u]; calls meanwhile() four times.
template <class Body>
PDSERVE_INLINE void transpose16(
    const char* const* rows, uint32_t* out, int64_t out_stride, const Body& meanwhile) {
#pragma GCC unroll 4
    for (int u = 0; u < 16; u += 4) {
        meanwhile();
        // a[r] holds, in 128-bit lane L, units u .. u + 3 of row 4 L + r. The loads place the
        // lanes, so that the shuffles below need not cross them.
        __m512i a[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const auto lane = [&](int row) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + u * 4));
            };
            a[r] = _mm512_castsi128_si512(lane(r));
            a[r] = _mm512_inserti32x4(a[r], lane(4 + r), 1);
            a[r] = _mm512_inserti32x4(a[r], lane(8 + r), 2);
            a[r] = _mm512_inserti32x4(a[r], lane(12 + r), 3);
        }
        const __m512i low01 = _mm512_unpacklo_epi32(a[0], a[1]);
        const __m512i high01 = _mm512_unpackhi_epi32(a[0], a[1]);
        const __m512i low23 = _mm512_unpacklo_epi32(a[2], a[3]);
        const __m512i high23 = _mm512_unpackhi_epi32(a[2], a[3]);
        uint32_t* column = out + u * out_stride;
        _mm512_storeu_si512(column, _mm512_unpacklo_epi64(low01, low23));
        _mm512_storeu_si512(column + out_stride, _mm512_unpackhi_epi64(low01, low23));
        _mm512_storeu_si512(column + 2 * out_stride, _mm512_unpacklo_epi64(high01, high23));
        _mm512_storeu_si512(column + 3 * out_stride, _mm512_unpackhi_epi64(high01, high23));
    }
}

#elif defined(__AVX2__)

// As above with 8 rows and two 128-bit lanes.
template <class Body>
PDSERVE_INLINE void transpose8(
    const char* const* rows, uint32_t* out, int64_t out_stride, const Body& meanwhile) {
#pragma GCC unroll 4
    for (int u = 0; u < 16; u += 4) {
        if (u % 8 == 0) meanwhile();
        __m256 a[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const auto lane = [&](int row) {
                return _mm_loadu_ps(reinterpret_cast<const float*>(rows[row]) + u);
            };
            a[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(lane(r)), lane(4 + r), 1);
        }
        const __m256 low01 = _mm256_unpacklo_ps(a[0], a[1]);
        const __m256 high01 = _mm256_unpackhi_ps(a[0], a[1]);
        const __m256 low23 = _mm256_unpacklo_ps(a[2], a[3]);
        const __m256 high23 = _mm256_unpackhi_ps(a[2], a[3]);
        float* column = reinterpret_cast<float*>(out + u * out_stride);
        _mm256_storeu_ps(column, _mm256_shuffle_ps(low01, low23, 0x44));
        _mm256_storeu_ps(column + out_stride, _mm256_shuffle_ps(low01, low23, 0xee));
        _mm256_storeu_ps(column + 2 * out_stride, _mm256_shuffle_ps(high01, high23, 0x44));
        _mm256_storeu_ps(column + 3 * out_stride, _mm256_shuffle_ps(high01, high23, 0xee));
    }
}

template <class Body>
PDSERVE_INLINE void transpose16(
    const char* const* rows, uint32_t* out, int64_t out_stride, const Body& meanwhile) {
    transpose8(rows, out, out_stride, meanwhile);
    transpose8(rows + 8, out + 8, out_stride, meanwhile);
}

#elif defined(__aarch64__)

template <class Body>
PDSERVE_INLINE void transpose16(
    const char* const* rows, uint32_t* out, int64_t out_stride, const Body& meanwhile) {
#pragma GCC unroll 4
    for (int u = 0; u < 16; u += 4) {
        meanwhile();
#pragma GCC unroll 4
        for (int r = 0; r < 16; r += 4) {
            const auto row = [&](int i) { return load_as<uint32x4_t>(rows[r + i] + u * 4); };
            const uint32x4_t a = row(0), b = row(1), c = row(2), d = row(3);
            const auto even_low = (uint64x2_t)vtrn1q_u32(a, b);
            const auto even_high = (uint64x2_t)vtrn1q_u32(c, d);
            const auto odd_low = (uint64x2_t)vtrn2q_u32(a, b);
            const auto odd_high = (uint64x2_t)vtrn2q_u32(c, d);
            uint32_t* column = out + u * out_stride + r;
            store(column, vtrn1q_u64(even_low, even_high));
            store(column + out_stride, vtrn1q_u64(odd_low, odd_high));
            store(column + 2 * out_stride, vtrn2q_u64(even_low, even_high));
            store(column + 3 * out_stride, vtrn2q_u64(odd_low, odd_high));
        }
    }
}

#else

template <class Body>
PDSERVE_INLINE void transpose16(
    const char* const* rows, uint32_t* out, int64_t out_stride, const Body& meanwhile) {
    for (int r = 0; r < 16; ++r) {
        if (r % 4 == 0) meanwhile();
        for (int u = 0; u < 16; ++u) {
            __builtin_memcpy(out + u * out_stride + r, rows[r] + u * 4, 4);
        }
    }
}

#endif

}  // namespace
}  // namespace pdserve::attention
