// The inner product of a few rows of x and a few panels, with the sums in registers.
//
// The sum of an output runs over the inputs in ascending order, in one chain of multiply-adds,
// however many rows and panels are computed together. So a row's result does not depend on other
// rows, bit for bit.
#pragma once

#include "kernel.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

// Panels computed together: the registers must hold the sums, a unit of weights, and an element of
// x in all lanes. 6 rows x 4 panels suffer less than 12 x 2 from cache conflicts between rows of x
// that are a multiple of 4 KiB apart.
constexpr int kWidestTile = kLanes == 16 ? 4 : 1;
constexpr int max_tile_rows(int num_panels) {
    if (kLanes == 16) return num_panels > 2 ? 6 : 12;
    return kLanes * kRegisters >= 128 ? 6 : 2;
}
constexpr int kMaxTileRows = max_tile_rows(1);

// The row stride of a tile's sums.
constexpr int kSumStride = kMaxChunkPanels * kPanelOutputs;

// Up to this many rows, memory bandwidth is the limit.
constexpr int kMaxStreamingRows = kLanes == 16 ? max_tile_rows(2) : 6;

// How far ahead weights are then fetched, in bytes of each panel, as measured. Of two panels with 12
// rows, what is asked for half as far ahead comes too late.
constexpr int64_t stream_distance(int num_panels) {
    if (kLanes < 16) return 1024;
    return num_panels > 2 ? 2048 : 8192;
}

// What is fetched from memory during a tile.
enum class Ahead {
    kStream,  // the tile's panels stream_distance bytes ahead, at their end the beginnings of those
              // at `next`; up to kMaxStreamingRows
    kNext,    // a line for each unit, at `next`, which then moves on by `next_step` bytes
    kWiden,   // as kNext; and what the reader makes of the panels is kept at `widened`
};

struct Tile {
    const uint8_t* x;
    int64_t x_row_bytes;
    const uint8_t* panels;
    int64_t panel_bytes;
    int64_t num_units;
    const uint8_t* next;
    int64_t next_step;
    uint8_t* widened;  // a unit for each step of the reader
    int64_t widened_panel_bytes;
    float* sums;  // [rows][kSumStride]
};

// Keeps a pointer to every third row. The rows between are addressed with one or two strides, which
// takes no further registers.
template <int kRows>
class RowCursor {
public:
    RowCursor(const uint8_t* x, int64_t row_bytes) : row_bytes_(row_bytes) {
        for (int i = 0; i < kBases; ++i) {
            bases_[i] = x + i * 3 * row_bytes;
            // Otherwise the compiler would see that they differ by a constant, and compute 12
            // addresses.
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
template <class Reader, int kRows, int kPanels, Ahead kAhead>
void sum_tile(const Tile& tile) {
    constexpr int kVectors = kPanels * kPanelVectors;
    using Scalar = typename Reader::Scalar;
    const uint8_t* unit = tile.panels;
    const uint8_t* next = tile.next;
    constexpr int64_t kDistance = stream_distance(kPanels);
    const int64_t last_own = tile.num_units - kDistance / kUnitBytes;
    const uint8_t* ahead = last_own > 0 ? unit + kDistance : next;
    uint8_t* widened = tile.widened;
    RowCursor<kRows> rows(tile.x, tile.x_row_bytes);
    FloatLanes totals[kRows][kVectors] = {};
    for (int64_t u = 0; u < tile.num_units; ++u, unit += kUnitBytes) {
        if constexpr (kAhead == Ahead::kStream) {
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) prefetch(ahead + p * tile.panel_bytes, 1);
            ahead = u + 1 == last_own ? next : ahead + kUnitBytes;
        } else {
            prefetch(next, kUnitBytes);
            next += tile.next_step;
        }
#pragma GCC unroll 4
        for (int step = 0; step < Reader::kSteps; ++step) {
            typename Reader::Lanes lanes[kPanels][kPanelVectors];
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                Reader::read(unit + p * tile.panel_bytes, step, lanes[p]);
            }
            if constexpr (kAhead == Ahead::kWiden) {
                // One by one: as a whole they would go through the stack, and the sums with them.
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) {
                    store(widened + v / kPanelVectors * tile.widened_panel_bytes
                            + v % kPanelVectors * (kUnitBytes / kPanelVectors),
                        lanes[v / kPanelVectors][v % kPanelVectors]);
                }
                widened += kUnitBytes;
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const auto factor = factor_of(rows.template element<Scalar>(r, step));
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) {
                    totals[r][v] = multiply_add(
                        totals[r][v], factor, lanes[v / kPanelVectors][v % kPanelVectors]);
                }
            }
        }
        rows.advance(Reader::kSteps * sizeof(Scalar));
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            store(tile.sums + r * kSumStride + v * kLanes, totals[r][v]);
        }
    }
}

}  // namespace
}  // namespace pdserve::linear
