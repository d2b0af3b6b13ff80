// One tile of keys and values: where its rows lie in the paged pool, and the packing of its keys.
#pragma once

#include "kernel.h"
#include "scratch.h"
#include "../simd.h"
#include "transpose.h"

namespace pdserve::attention {
namespace {

// What a score multiplies: pairs of bfloat16 where the CPU can, else float32.
template <class T>
struct ScoreUnit {
    using type = float;
    static constexpr bool is_pair = false;
};
#if defined(__AVX512BF16__)
template <>
struct ScoreUnit<BFloat16> {
    using type = uint32_t;
    static constexpr bool is_pair = true;
};
#endif

PDSERVE_INLINE uint32_t pair_of(const BFloat16* row, int d, int head_dim) {
    const uint32_t high = d + 1 < head_dim ? row[d + 1].bits : 0;
    return row[d].bits | high << 16;
}

template <class T>
struct TileRows {
    // A value stands at a fixed distance from its key. Keys that nobody sees are a row of zeros.
    const T* keys[kTileKeys];
    int first;  // keys [first, last) of the tile are seen by at least one query;
    int last;   // last <= 0: none is

    void gather(const Call& call, const WorkItem& item, int tile_start, int first_key,
        int last_key, const T* zero_row) {
        first = first_key > tile_start ? first_key - tile_start : 0;
        last = last_key - tile_start < kTileKeys ? last_key - tile_start : kTileKeys;
        const int32_t* table = call.block_tables + item.request * call.table_stride;
        const int64_t head_elements = static_cast<int64_t>(call.block_size) * call.head_dim;
        const T* head_pool = static_cast<const T*>(call.layer_pool) + item.kv_head * head_elements;
        int k = 0;
        for (; k < first; ++k) keys[k] = zero_row;
        int block = (tile_start + k) / call.block_size;
        int offset = (tile_start + k) % call.block_size;
        for (; k < last; ++block, offset = 0) {
            const T* row = head_pool + table[block] * call.block_stride
                + static_cast<int64_t>(offset) * call.head_dim;
            for (; offset < call.block_size && k < last; ++offset, row += call.head_dim) {
                keys[k++] = row;
            }
        }
        for (; k < kTileKeys; ++k) keys[k] = zero_row;
    }
};

// packed[u * kTileKeys + k] = unit u of keys[k], for the 16 keys at `keys`. Of the next tile's
// keys the same part is prefetched: one line for each that is used, or the requests queue up.
template <class T>
void pack_16_keys(const T* const* keys, const T* const* next_keys, int head_dim,
    typename ScoreUnit<T>::type* packed) {
    constexpr int kElements = 4 / sizeof(T);  // in 32 bits
    const char* cursors[kTransposeSize];
    for (int k = 0; k < kTransposeSize; ++k) cursors[k] = reinterpret_cast<const char*>(keys[k]);
    int d = 0;
    for (; d + kTransposeSize * kElements <= head_dim; d += kTransposeSize * kElements) {
        for (int k = 0; k < kTransposeSize; ++k) prefetch(next_keys[k] + d, 1);
        if constexpr (kElements == 1 || ScoreUnit<T>::is_pair) {
            auto* target = reinterpret_cast<uint32_t*>(packed + d / kElements * kTileKeys);
            transpose16(cursors, target, kTileKeys);
        } else {
            alignas(64) uint32_t pairs[kTransposeSize * kTransposeSize];
            transpose16(cursors, pairs, kTransposeSize);
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
    for (; d < head_dim; d += ScoreUnit<T>::is_pair ? 2 : 1) {
        for (int k = 0; k < kTransposeSize; ++k) {
            if constexpr (ScoreUnit<T>::is_pair) {
                packed[d / 2 * kTileKeys + k] = pair_of(keys[k], d, head_dim);
            } else {
                packed[d * kTileKeys + k] = to_float(keys[k][d]);
            }
        }
    }
}

}  // namespace
}  // namespace pdserve::attention
