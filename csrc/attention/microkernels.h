// The two inner products of attention, for a few queries at a time so that sums stay in registers.
//
// What a sum adds up, and in which order, never depends on how many queries or columns are done
// together: that is what makes a row's result independent of its batch and of its chunk.
#pragma once

#include "scratch.h"
#include "../simd.h"

namespace pdserve::attention {
namespace {

// Queries that are done together, and vectors of sums for each: what the registers hold.
constexpr int kMaxQueries = kLanes == 4 ? 4 : 6;
constexpr int columns_for(int num_queries) {
    return kLanes == 16 || num_queries <= 2 ? 4 : num_queries <= 4 && kLanes == 8 ? 3 : 2;
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls body(first, Count<n>) over queries [first, last), in pieces of nearly equal size.
template <class Body>
PDSERVE_INLINE void for_queries(int first, int last, const Body& body) {
    while (first < last) {
        const int left = last - first;
        const int num = left <= kMaxQueries ? left
            : left < 2 * kMaxQueries        ? (left + 1) / 2
                                            : kMaxQueries;
        switch (num) {
            case 1: body(first, Count<1>{}); break;
            case 2: body(first, Count<2>{}); break;
            case 3: body(first, Count<3>{}); break;
            case 4: body(first, Count<4>{}); break;
            case 5: body(first, Count<kMaxQueries < 5 ? 1 : 5>{}); break;
            default: body(first, Count<kMaxQueries < 6 ? 1 : 6>{}); break;
        }
        first += num;
    }
}

// Calls body(column, Count<n>) over num_columns vectors, n at a time as long as that many are left.
template <int N, class Body>
PDSERVE_INLINE void for_columns(int num_columns, const Body& body) {
    int column = 0;
    for (; column + N <= num_columns; column += N) body(column, Count<N>{});
    if constexpr (N > 2) {
        if (column + 2 <= num_columns) {
            body(column, Count<2>{});
            column += 2;
        }
    }
    for (; column < num_columns; ++column) body(column, Count<1>{});
}

// scores[q * kTileKeys + k] = sum over u of queries[q * query_stride + u] * keys[u * kTileKeys + k]
// for Q queries and C vectors of keys. A unit is a float32, or a pair of bfloat16.
template <int Q, int C, class Unit>
PDSERVE_INLINE void score_keys(
    const Unit* queries, int64_t query_stride, const Unit* keys, int num_units, float* scores) {
    FloatLanes sums[Q][C] = {};
    for (int u = 0; u < num_units; ++u) {
        decltype(load(keys)) key_lanes[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) key_lanes[c] = load(keys + u * kTileKeys + c * kLanes);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const auto query = splat(queries[q * query_stride + u]);
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

// Rows of values: row k is rows[k] + offset. `next` are those of the tile that comes next.
template <class T>
struct ValueRows {
    const T* const* rows;
    const T* const* next;
    int64_t offset;
    int first;
    int last;
};

// sums[q * sum_stride + d] is multiplied by decay[q], and gets the sum over k of
// weights[q * kTileKeys + k] * value[k][d] added,
// for Q queries and C vectors of head_dim, keys in ascending order.
template <int Q, int C, class T>
PDSERVE_INLINE void add_values(const float* weights, const ValueRows<T>& values, int64_t column,
    const float* decay, float* sums, int64_t sum_stride) {
    const int64_t offset = values.offset + column;
    FloatLanes totals[Q][C];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            totals[q][c] = load(sums + q * sum_stride + column + c * kLanes) * splat(decay[q]);
        }
    }
    for (int k = values.first; k < values.last; ++k) {
        const T* row = values.rows[k] + offset;
        FloatLanes value_lanes[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) value_lanes[c] = load(row + c * kLanes);
        prefetch(values.next[k] + offset, C * kLanes * sizeof(T));
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const FloatLanes weight = splat(weights[q * kTileKeys + k]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                totals[q][c] = multiply_add(totals[q][c], weight, value_lanes[c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            store(sums + q * sum_stride + column + c * kLanes, totals[q][c]);
        }
    }
}

}  // namespace
}  // namespace pdserve::attention
