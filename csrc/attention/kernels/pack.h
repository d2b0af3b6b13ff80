// Copies a tile's keys and values into the layout in which the inner products read them.
#pragma once

#include "tile.h"
#include "transpose.h"

namespace pdserve::attention {
namespace {

// packed[u * kTileKeys + k] = unit u of keys[k], for the 16 keys at `keys`. Half a pair is filled up
// with zero. Prefetches the next tile meanwhile.
template <int kLinesAtOnce, class T>
void pack_16_keys(
    const T* const* keys, int head_dim, Prefetcher& next, typename Unit<T>::type* packed) {
    constexpr int kElements = 4 / sizeof(T);  // in 32 bits
    constexpr bool kIsPair = Unit<T>::is_pair;
    const char* cursors[kTransposeSize];
    for (int k = 0; k < kTransposeSize; ++k) cursors[k] = reinterpret_cast<const char*>(keys[k]);
    const auto ask = [&] { next.ask<kLinesAtOnce>(); };
    int d = 0;
    for (; d + kTransposeSize * kElements <= head_dim; d += kTransposeSize * kElements) {
        if constexpr (kElements == 1 || kIsPair) {
            auto* target = reinterpret_cast<uint32_t*>(packed + d / kElements * kTileKeys);
            transpose16(cursors, target, kTileKeys, ask);
        } else {
            alignas(64) uint32_t pairs[kTransposeSize * kTransposeSize];
            transpose16(cursors, pairs, kTransposeSize, ask);
            for (int u = 0; u < kTransposeSize; ++u) {
                float* low = packed + (d + 2 * u) * kTileKeys;
                for (int k = 0; k < kTransposeSize; k += kLanes) {
                    const PairLanes pair = load(pairs + u * kTransposeSize + k);
                    store(low + k, pair << 16);
                    store(low + kTileKeys + k, pair & 0xffff0000u);
                }
            }
        }
        for (const char*& cursor : cursors) cursor += kTransposeSize * 4;
    }
    for (; d < head_dim; d += kIsPair ? 2 : 1) {
        for (int k = 0; k < kTransposeSize; ++k) {
            if constexpr (kIsPair) {
                const T high = d + 1 < head_dim ? keys[k][d + 1] : T{};
                packed[d / 2 * kTileKeys + k] = pair_of(keys[k][d], high);
            } else {
                packed[d * kTileKeys + k] = to_float(keys[k][d]);
            }
        }
    }
}

#if defined(PDSERVE_HAS_PAIRS)
// Elements 0 .. kLanes - 1 and kLanes .. 2 * kLanes - 1 of two rows, as pairs (low row, high row).
PDSERVE_INLINE void interleave(const BFloat16* low, const BFloat16* high, PairLanes (&pairs)[2]) {
#if defined(__AVX512BF16__)
    const auto order = [](int first) {
        const __m512i even = _mm512_add_epi32(_mm512_set1_epi32(first),
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(32));
        return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    };
    const __m512i a = _mm512_loadu_si512(low), b = _mm512_loadu_si512(high);
    pairs[0] = (PairLanes)_mm512_permutex2var_epi16(a, order(0), b);
    pairs[1] = (PairLanes)_mm512_permutex2var_epi16(a, order(16), b);
#else
    const auto a = load_as<uint16x8_t>(low), b = load_as<uint16x8_t>(high);
    pairs[0] = (PairLanes)vzip1q_u16(a, b);
    pairs[1] = (PairLanes)vzip2q_u16(a, b);
#endif
}
#endif

// packed[u * stride + d] = unit u of dimension d: the value of key u, or of keys 2u and 2u + 1; for
// d up to padded_dim.
template <class T>
void pack_values(
    const TileRows<T>& tile, int head_dim, int padded_dim, int64_t stride,
    typename Unit<T>::type* packed) {
    if constexpr (Unit<T>::is_pair) {
        for (int k = tile.first / 2 * 2; k < tile.last; k += 2) {
            const T *low = tile.values[k], *high = tile.values[k + 1];
            uint32_t* row = packed + k / 2 * stride;
            int d = 0;
#if defined(PDSERVE_HAS_PAIRS)
            for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
                PairLanes pairs[2];
                interleave(low + d, high + d, pairs);
                store(row + d, pairs[0]);
                store(row + d + kLanes, pairs[1]);
            }
#endif
            for (; d < head_dim; ++d) row[d] = pair_of(low[d], high[d]);
            for (; d < padded_dim; ++d) row[d] = 0;
        }
    } else {
        for (int k = tile.first; k < tile.last; ++k) {
            float* row = packed + k * stride;
            int d = 0;
            for (; d + kLanes <= head_dim; d += kLanes) store(row + d, load(tile.values[k] + d));
            for (; d < head_dim; ++d) row[d] = to_float(tile.values[k][d]);
            for (; d < padded_dim; ++d) row[d] = 0.0f;
        }
    }
}

}  // namespace
}  // namespace pdserve::attention
