// Keys as float32 or as pairs, transposed before they are scored. Then a score is one chain of multiply-adds,
// and needs no sum across lanes.
#pragma once

#include "pack.h"
#include "products.h"

namespace pdserve::attention {
namespace {

// scores[q * kTileKeys + k] = sum over u of queries[q * query_stride + u] * keys[u * kTileKeys + k]
// for Q queries and C vectors of keys.
template <int Q, int C, class U>
PDSERVE_INLINE void score_keys(const U* queries, int64_t query_stride, const U* keys,
    int num_units, Prefetcher& next, float* scores) {
    FloatLanes sums[Q][C] = {};
    for (int u = 0; u < num_units; ++u) {
        if constexpr (Q > 1) next.ask<kLinesAtScoring>();
        decltype(load(keys)) key_lanes[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) key_lanes[c] = load(keys + u * kTileKeys + c * kLanes);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const auto query = factor_of(queries[q * query_stride + u]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sums[q][c] = multiply_add(sums[q][c], query, key_lanes[c]);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(scores + q * kTileKeys + c * kLanes, sums[q][c]);
    }
}

// The keys of the current tile, for queries of type T.
template <class T, class S>
class TransposedKeys {
    using U = typename Unit<T>::type;

public:
    TransposedKeys(const Call& call, const Scratch& scratch)
        : head_dim_(call.head_dim),
          padded_dim_(padded_head_dim(call.head_dim)),
          packed_(reinterpret_cast<U*>(scratch.packed_keys)) {}

    void bring(const TileRows<S>& tile, int num_queries, TileRows<S>& next) const {
        Prefetcher& ahead = next.prefetcher;
        for (int k = 0; k < tile.last; k += kTransposeSize) {
            if (num_queries == 1) {
                pack_16_keys<kLinesAtPackingForOne>(tile.keys + k, head_dim_, ahead, packed_ + k);
            } else {
                pack_16_keys<kLinesAtPacking>(tile.keys + k, head_dim_, ahead, packed_ + k);
            }
        }
    }

    // For keys [0, num_keys) of the tile: whole groups of 16.
    template <int Q>
    PDSERVE_INLINE void score(
        const U* queries, int num_keys, Prefetcher& next, float* scores) const {
        const int num_units = Unit<T>::is_pair ? (head_dim_ + 1) / 2 : head_dim_;
        for_columns<columns_for(Q)>(num_keys / kLanes, [&](int column, auto num) {
            const int k = column * kLanes;
            score_keys<Q, num.value>(
                queries, padded_dim_, packed_ + k, num_units, next, scores + k);
        });
    }

private:
    const int head_dim_;
    const int padded_dim_;
    U* const packed_;
};

}  // namespace
}  // namespace pdserve::attention
