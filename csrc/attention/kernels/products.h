// Attention multiplies for a few queries at a time, so that the sums stay in registers: scores in
// quads.h and transposed_keys.h, weights x values here.
//
// The terms of a sum and their order never depend on how many queries or columns are computed
// together. So a row's result does not depend on its batch or on how its prompt is split into
// chunks.
#pragma once

#include <type_traits>

#include "decode_codes.h"
#include "pack.h"
#include "scratch.h"
#include "seeing.h"

namespace pdserve::attention {
namespace {

// Number of vectors of sums for each of Q queries: as many as fit into the registers.
constexpr int kQueriesAtOnce = kLanes * kRegisters < 128 ? 4 : kMaxQueries;
constexpr int columns_for(int num_queries) {
    return kRegisters == 32 || num_queries <= 2 ? 4 : num_queries <= 4 && kLanes == 8 ? 3 : 2;
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
        const int num = left <= kQueriesAtOnce ? left
            : left < 2 * kQueriesAtOnce        ? (left + 1) / 2
                                               : kQueriesAtOnce;
        switch (num) {
            case 1: body(first, Count<1>{}); break;
            case 2: body(first, Count<2>{}); break;
            case 3: body(first, Count<3>{}); break;
            case 4: body(first, Count<4>{}); break;
            case 5: body(first, Count<kQueriesAtOnce < 5 ? 1 : 5>{}); break;
            default: body(first, Count<kQueriesAtOnce < 6 ? 1 : 6>{}); break;
        }
        first += num;
    }
}

// Calls body(column, Count<n>) for num_columns vectors: n at a time, then the rest in smaller
// steps.
template <int N, int kFewest = 1, class Body>
PDSERVE_INLINE void for_columns(int num_columns, const Body& body) {
    int column = 0;
    for (; column + N <= num_columns; column += N) body(column, Count<N>{});
    if constexpr (N > 2) {
        if (column + 2 <= num_columns) {
            body(column, Count<2>{});
            column += 2;
        }
    }
    if constexpr (kFewest == 1) {
        for (; column < num_columns; ++column) body(column, Count<1>{});
    }
}

// Values copied by pack_values.
template <class U>
struct PackedValues {
    const U* start;
    int64_t stride;  // padded_dim

    template <class Lanes, int C>
    PDSERVE_INLINE void load_columns(int unit, int64_t column, Lanes (&lanes)[C]) const {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) lanes[c] = load(start + unit * stride + column + c * kLanes);
    }
};

// Values read directly from the pool, for few queries.
template <class S>
struct ValuesInPlace {
    const S* const* rows;

    template <class Lanes, int C>
    PDSERVE_INLINE void load_columns(int unit, int64_t column, Lanes (&lanes)[C]) const {
        constexpr bool kIsPair = std::is_same_v<Lanes, PairLanes>;
#if defined(PDSERVE_HAS_CODE_TABLES)
        if constexpr (kIsPair && std::is_same_v<S, Fp8> && C > 1) {
            const S *low = rows[2 * unit] + column, *high = rows[2 * unit + 1] + column;
            return decode_pairs<C>(low, high, lanes);
        }
#endif
        if constexpr (kIsPair && kIsCoded<S>) {
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const int64_t d = column + c * kLanes;
                lanes[c] =
                    exact_pairs(load_row(rows[2 * unit] + d), load_row(rows[2 * unit + 1] + d));
            }
        } else if constexpr (kIsPair) {
#if defined(PDSERVE_HAS_PAIRS)
#pragma GCC unroll 8
            for (int c = 0; c < C; c += 2) {
                PairLanes pairs[2];
                const int64_t d = column + c * kLanes;
                interleave(rows[2 * unit] + d, rows[2 * unit + 1] + d, pairs);
                lanes[c] = pairs[0];
                lanes[c + 1] = pairs[1];
            }
#endif
        } else {
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                lanes[c] = load_row(rows[unit] + column + c * kLanes);
            }
        }
    }
};

// For Q queries and C vectors of dimensions d:
//     sums[q * sum_stride + d] = sums[q * sum_stride + d] * decays[q]
//                              + sum over k in `keys`, ascending, of weights[q][k] * value[k][d].
// If only one key of a pair is in `keys`, the value of the other counts as 0, since it may be NaN.
template <int Q, int C, class U, class Values>
PDSERVE_INLINE void add_values(const U* weights, const Values& values, Range keys,
    Prefetcher& next, int64_t column, const float* decays, float* sums, int64_t sum_stride) {
    FloatLanes totals[Q][C];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            totals[q][c] = load(sums + q * sum_stride + column + c * kLanes) * splat(decays[q]);
        }
    }
    const auto add_unit = [&](int u, const auto& masked) {
        decltype(load(weights)) lanes[C];
        values.load_columns(u, column, lanes);
        next.ask<kLinesAtAdding>();
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) lanes[c] = masked(lanes[c]);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const auto weight = factor_of(weights[q * kTileKeys + u]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                totals[q][c] = multiply_add(totals[q][c], weight, lanes[c]);
            }
        }
    };
    const auto whole = [](auto lanes) { return lanes; };
    if constexpr (std::is_same_v<U, uint32_t>) {
        int u = keys.first / 2;
        if (keys.first % 2 != 0) add_unit(u++, [](auto pair) { return pair & 0xffff0000u; });
        for (; u < keys.last / 2; ++u) add_unit(u, whole);
        if (keys.last % 2 != 0) add_unit(u, [](auto pair) { return pair & 0x0000ffffu; });
    } else {
        for (int u = keys.first; u < keys.last; ++u) add_unit(u, whole);
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
