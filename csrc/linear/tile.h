// The inner product: a few rows of x by a few panels, sums in registers.
//
// An output's sum runs over the inputs in ascending order, in one chain of multiply-adds, however
// many rows and panels are done together. That makes a row's bits independent of all other rows.
#pragma once

#include <utility>

#include "kernel.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

// What the registers hold: sums, a unit of weights, and an element of x in all lanes. 6 x 4 reads
// weights from the cache less smoothly than 12 x 2, but is less troubled by rows of x that lie
// a multiple of 4 KiB apart.
constexpr int kWidestTile = kLanes == 16 ? 4 : 1;
constexpr int max_tile_rows(int num_panels) {
    return kLanes == 16 ? (num_panels > 2 ? 6 : 12) : kLanes == 8 ? 6 : 2;
}
constexpr int kMaxTileRows = max_tile_rows(1);

// Sums of a tile stand in rows of this many.
constexpr int kSumStride = kMaxChunkPanels * kPanelOutputs;

// What is fetched from memory meanwhile: `num_lines` lines for each unit, from `start` on.
struct Prefetch {
    const uint8_t* start;
    int num_lines;
};

// Pointers to every third row: the rows between are reached by adding a stride or two, which costs
// no register.
template <int kRows>
class RowCursor {
public:
    RowCursor(const uint8_t* x, int64_t row_bytes) : row_bytes_(row_bytes) {
        for (int i = 0; i < kBases; ++i) {
            bases_[i] = x + i * 3 * row_bytes;
            // Else the compiler sees that they differ by a constant, and computes each of 12.
            asm("" : "+r"(bases_[i]));
        }
    }

    template <class Scalar>
    PDSERVE_INLINE Scalar element(int row, int index) const {
        Scalar value;
        const uint8_t* start = bases_[row / 3] + row % 3 * row_bytes_;
        __builtin_memcpy(&value, start + index * sizeof(Scalar), sizeof(Scalar));
        return value;
    }

    PDSERVE_INLINE void advance(int num_bytes) {
#pragma GCC unroll 4
        for (int i = 0; i < kBases; ++i) bases_[i] += num_bytes;
    }

private:
    static constexpr int kBases = (kRows + 2) / 3;
    const uint8_t* bases_[kBases];
    const int64_t row_bytes_;
};

// sums[r * kSumStride + o] = sum over inputs of x[r] * weights[o]
template <class Reader, int kRows, int kPanels>
void sum_tile(const uint8_t* x, int64_t x_row_bytes, const uint8_t* panels, int64_t panel_bytes,
    int64_t num_units, Prefetch ahead, float* sums) {
    constexpr int kVectors = kPanels * kPanelVectors;
    using Scalar = typename Reader::Scalar;
    RowCursor<kRows> rows(x, x_row_bytes);
    FloatLanes totals[kRows][kVectors] = {};
    for (int64_t u = 0; u < num_units; ++u) {
        typename Reader::Lanes lanes[kPanels][Reader::kSteps][kPanelVectors];
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
            Reader::read(panels + p * panel_bytes + u * Reader::kUnitBytes, lanes[p]);
        }
        for (int line = 0; line < ahead.num_lines; ++line) prefetch(ahead.start + line * 64, 1);
        ahead.start += ahead.num_lines * 64;
#pragma GCC unroll 2
        for (int step = 0; step < Reader::kSteps; ++step) {
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const auto factor = splat(rows.template element<Scalar>(r, step));
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) {
                    totals[r][v] = multiply_add(totals[r][v], factor,
                        lanes[v / kPanelVectors][step][v % kPanelVectors]);
                }
            }
        }
        rows.advance(Reader::kSteps * sizeof(Scalar));
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            store(sums + r * kSumStride + v * kLanes, totals[r][v]);
        }
    }
}

using SumTileFunction = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, int64_t,
    Prefetch, float*);

// sum_tile for 1 to max_tile_rows(kPanels) rows, at [rows - 1].
template <class Reader, int kPanels>
struct SumTiles {
    SumTileFunction functions[max_tile_rows(kPanels)];

    template <int... kIndex>
    static constexpr SumTiles of(std::integer_sequence<int, kIndex...>) {
        return {{sum_tile<Reader, kIndex + 1, kPanels>...}};
    }
};

template <class Reader, int kPanels>
constexpr auto kSumTiles = SumTiles<Reader, kPanels>::of(
    std::make_integer_sequence<int, max_tile_rows(kPanels)>{});

template <class Reader>
SumTileFunction sum_tile_for(int num_rows, int num_panels) {
    if constexpr (kWidestTile == 4) {
        if (num_panels == 4) return kSumTiles<Reader, 4>.functions[num_rows - 1];
        if (num_panels == 2) return kSumTiles<Reader, 2>.functions[num_rows - 1];
    }
    return kSumTiles<Reader, 1>.functions[num_rows - 1];
}

}  // namespace
}  // namespace pdserve::linear
