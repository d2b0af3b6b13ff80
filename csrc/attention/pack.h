// Copies a tile's keys and values into the layout in which the inner products read them.
#pragma once

#include "tile.h"
#include "transpose.h"

namespace pdserve::attention {
namespace {

// packed[d * kTileKeys + k] = element d of keys[k], for the 16 keys at `keys`. Prefetches the next
// tile meanwhile.
template <int kLinesAtOnce, class T>
void pack_16_keys(
    const T* const* keys, int head_dim, Prefetcher& next, float* packed) {
    constexpr int kElements = 4 / sizeof(T);  // in 32 bits
    const char* cursors[kTransposeSize];
    for (int k = 0; k < kTransposeSize; ++k) cursors[k] = reinterpret_cast<const char*>(keys[k]);
    const auto ask = [&] { next.ask<kLinesAtOnce>(); };
    int d = 0;
    for (; d + kTransposeSize * kElements <= head_dim; d += kTransposeSize * kElements) {
        if constexpr (kElements == 1) {
            auto* target = reinterpret_cast<uint32_t*>(packed + d * kTileKeys);
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
    for (; d < head_dim; ++d) {
        for (int k = 0; k < kTransposeSize; ++k) packed[d * kTileKeys + k] = to_float(keys[k][d]);
    }
}

#if defined(__AVX512BF16__)
// Elements 0 .. 15 and 16 .. 31 of two rows, as pairs (low row, high row).
PDSERVE_INLINE void interleave(const BFloat16* low, const BFloat16* high, PairLanes (&pairs)[2]) {
    const auto order = [](int first) {
        const __m512i even = _mm512_add_epi32(_mm512_set1_epi32(first),
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(32));
        return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    };
    const __m512i a = _mm512_loadu_si512(low), b = _mm512_loadu_si512(high);
    pairs[0] = (PairLanes)_mm512_permutex2var_epi16(a, order(0), b);
    pairs[1] = (PairLanes)_mm512_permutex2var_epi16(a, order(16), b);
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
#if defined(__AVX512BF16__)
            for (; d + 32 <= head_dim; d += 32) {
                PairLanes pairs[2];
                interleave(low + d, high + d, pairs);
                store(row + d, pairs[0]);
                store(row + d + 16, pairs[1]);
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
