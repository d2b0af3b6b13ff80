// The inner product of tile.h with Arm's BFMMLA, which multiplies 2 rows by 2 outputs, 4 inputs at a
// time: twice the work of a dot product of pairs.
//
// All numbers of rows use this instruction, an odd one with a row of zeros. So a row's result does
// not depend on other rows, bit for bit, whatever the CPU's rounding within the instruction.
#pragma once

#include "tile.h"

namespace pdserve::linear {
namespace {

#if defined(PDSERVE_HAS_PAIRS) && defined(__aarch64__)

// 4 inputs of 16 outputs, as they are packed: the first pairs, then the second ones.
struct Quads {
    PairLanes pairs[2][kPanelVectors];
};

template <class Reader>
PDSERVE_INLINE Quads read_quads(const uint8_t* unit) {
    Quads quads;
    Reader::read(unit, 0, quads.pairs[0]);
    Reader::read(Reader::kSteps == 2 ? unit : unit + kUnitBytes, 1, quads.pairs[1]);
    return quads;
}

// An odd number of pairs ends with half a quad.
PDSERVE_INLINE Quads read_half(const uint8_t* unit) {
    Quads quads = {};
    ReadBFloat16Pairs::read(unit, 0, quads.pairs[0]);
    return quads;
}

// Sums of 2 rows by 2 outputs: [row][output].
template <int kRows>
struct MatrixSums {
    static constexpr int kRowPairs = (kRows + 1) / 2;
    static constexpr int kOutputPairs = kPanelOutputs / 2;
    float32x4_t of[kRowPairs][kOutputPairs] = {};

    // The next elements of each row: 4, or as many as fit into Scalar.
    template <class Scalar>
    PDSERVE_INLINE void add(const RowCursor<kRows>& rows, const Quads& weights) {
        bfloat16x8_t x[kRowPairs];
#pragma GCC unroll 4
        for (int p = 0; p < kRowPairs; ++p) {
            const uint64_t low = rows.template element<Scalar>(2 * p, 0);
            const uint64_t high =
                2 * p + 1 < kRows ? rows.template element<Scalar>(2 * p + 1, 0) : 0;
            x[p] = (bfloat16x8_t)vcombine_u64(vcreate_u64(low), vcreate_u64(high));
        }
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const auto first = (uint32x4_t)weights.pairs[0][v];
            const auto second = (uint32x4_t)weights.pairs[1][v];
            const auto lower = (bfloat16x8_t)vzip1q_u32(first, second);
            const auto upper = (bfloat16x8_t)vzip2q_u32(first, second);
#pragma GCC unroll 4
            for (int p = 0; p < kRowPairs; ++p) {
                of[p][2 * v] = vbfmmlaq_f32(of[p][2 * v], x[p], lower);
                of[p][2 * v + 1] = vbfmmlaq_f32(of[p][2 * v + 1], x[p], upper);
            }
        }
    }

    PDSERVE_INLINE void put(float* sums) const {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; ++v) {
                const auto lower = (float64x2_t)of[r / 2][2 * v];
                const auto upper = (float64x2_t)of[r / 2][2 * v + 1];
                store(sums + r * kSumStride + v * kLanes,
                    r % 2 == 0 ? vzip1q_f64(lower, upper) : vzip2q_f64(lower, upper));
            }
        }
    }
};

template <class Reader, int kRows, Ahead kAhead>
void sum_matrix_tile(const Tile& tile) {
    constexpr int kUnits = 2 / Reader::kSteps;  // of 4 inputs
    const uint8_t* unit = tile.panels;
    const uint8_t* next = tile.next;
    constexpr int64_t kDistance = stream_distance(1);
    const int64_t last_own = tile.num_units - kDistance / kUnitBytes;
    uint8_t* widened = tile.widened;
    RowCursor<kRows> rows(tile.x, tile.x_row_bytes);
    MatrixSums<kRows> sums;
    int64_t u = 0;
    for (; u + kUnits <= tile.num_units; u += kUnits, unit += kUnits * kUnitBytes) {
        if constexpr (kAhead == Ahead::kStream) {
            const bool is_own = u < last_own;
            prefetch(is_own ? unit + kDistance : next, kUnits * kUnitBytes);
            if (!is_own) next += kUnits * kUnitBytes;
        } else {
#pragma GCC unroll 2
            for (int i = 0; i < kUnits; ++i, next += tile.next_step) prefetch(next, kUnitBytes);
        }
        const Quads weights = read_quads<Reader>(unit);
        if constexpr (kAhead == Ahead::kWiden) {
            __builtin_memcpy(widened, &weights, sizeof(weights));
            widened += sizeof(weights);
        }
        sums.template add<uint64_t>(rows, weights);
        rows.advance(sizeof(uint64_t));
    }
    if (u < tile.num_units) sums.template add<uint32_t>(rows, read_half(unit));
    sums.put(tile.sums);
}

#endif

}  // namespace
}  // namespace pdserve::linear
