// Copies a tile's keys and values into the layout in which the inner products read them.
#pragma once

#include <type_traits>

#include "tile.h"
#include "transpose.h"

namespace pdserve::attention {
namespace {

// packed[u * kTileKeys + k] = unit u of keys[k], for the 16 keys at `keys`. Half a pair is filled up
// with zero. Prefetches the next tile meanwhile.
template <int kLinesAtOnce, class T>
void pack_16_rows(
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

// The same of codes: 4 stand in 32 bits. The last ones are copied, since what is behind them need
// not be the pool's.
template <int kLinesAtOnce, class U, class S>
void pack_16_coded_rows(const S* const* keys, int head_dim, Prefetcher& next, U* packed) {
    constexpr int kCodes = kTransposeSize * 4;  // of a row, at a time
    constexpr bool kIsPair = std::is_same_v<U, uint32_t>;
    const auto ask = [&] { next.ask<kLinesAtOnce>(); };
    for (int d = 0; d < head_dim; d += kCodes) {
        const int left = head_dim - d < kCodes ? head_dim - d : kCodes;
        const char* cursors[kTransposeSize];
        alignas(64) char copies[kTransposeSize][kCodes];
        for (int k = 0; k < kTransposeSize; ++k) {
            cursors[k] = reinterpret_cast<const char*>(keys[k] + d);
            if (left == kCodes) continue;
            __builtin_memset(copies[k], 0, kCodes);
            __builtin_memcpy(copies[k], cursors[k], left);
            cursors[k] = copies[k];
        }
        alignas(64) uint32_t codes[kTransposeSize * kTransposeSize];
        transpose16(cursors, codes, kTransposeSize, ask);
        for (int u = 0; u < (left + 3) / 4; ++u) {
            U* rows = packed + (d + 4 * u) / (kIsPair ? 2 : 1) * kTileKeys;
            for (int k = 0; k < kTransposeSize; k += kLanes) {
                const PairLanes four = load(codes + u * kTransposeSize + k);
                const FloatLanes numbers[] = {decode(four, S{}), decode(four >> 8, S{}),
                    decode(four >> 16, S{}), decode(four >> 24, S{})};
                if constexpr (kIsPair) {
                    store(rows + k, exact_pairs(numbers[0], numbers[1]));
                    store(rows + kTileKeys + k, exact_pairs(numbers[2], numbers[3]));
                } else {
                    for (int i = 0; i < 4; ++i) store(rows + i * kTileKeys + k, numbers[i]);
                }
            }
        }
    }
}

template <int kLinesAtOnce, class U, class S>
PDSERVE_INLINE void pack_16_keys(const S* const* keys, int head_dim, Prefetcher& next, U* packed) {
    if constexpr (kIsCoded<S>) {
        pack_16_coded_rows<kLinesAtOnce>(keys, head_dim, next, packed);
    } else {
        pack_16_rows<kLinesAtOnce>(keys, head_dim, next, packed);
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
// d up to padded_dim. Of codes, without their scales.
template <class U, class S>
void pack_values(
    const TileRows<S>& tile, int head_dim, int padded_dim, int64_t stride, U* packed) {
    if constexpr (std::is_same_v<U, uint32_t>) {
        for (int k = tile.first / 2 * 2; k < tile.last; k += 2) {
            const S *low = tile.values[k], *high = tile.values[k + 1];
            uint32_t* row = packed + k / 2 * stride;
            int d = 0;
            if constexpr (kIsCoded<S>) {
                for (; d + kLanes <= head_dim; d += kLanes) {
                    store(row + d, exact_pairs(load_row(low + d), load_row(high + d)));
                }
                for (; d < head_dim; ++d) {
                    row[d] = exact_pairs(splat(element_of(low[d])), splat(element_of(high[d])))[0];
                }
            } else {
#if defined(PDSERVE_HAS_PAIRS)
                for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
                    PairLanes pairs[2];
                    interleave(low + d, high + d, pairs);
                    store(row + d, pairs[0]);
                    store(row + d + kLanes, pairs[1]);
                }
#endif
                for (; d < head_dim; ++d) row[d] = pair_of(low[d], high[d]);
            }
            for (; d < padded_dim; ++d) row[d] = 0;
        }
    } else {
        for (int k = tile.first; k < tile.last; ++k) {
            const S* values = tile.values[k];
            float* row = packed + k * stride;
            int d = 0;
            for (; d + kLanes <= head_dim; d += kLanes) store(row + d, load_row(values + d));
            for (; d < head_dim; ++d) row[d] = element_of(values[d]);
            for (; d < padded_dim; ++d) row[d] = 0.0f;
        }
    }
}

}  // namespace
}  // namespace pdserve::attention
