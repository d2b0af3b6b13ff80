// The inner product: a few rows of x by a few panels, sums in registers.
//
// An output's sum runs over the inputs in ascending order, in one chain of multiply-adds, however
// many rows and panels are done together. That makes a row's bits independent of all other rows.
#pragma once

#include "kernel.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

// What the registers hold: sums, a unit of weights, and an element of x in all lanes.
constexpr int kTilePanels = kLanes == 16 ? 2 : 1;
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;

// What is fetched from memory meanwhile: `num_lines` lines for each unit, from `start` on.
struct Prefetch {
    const uint8_t* start;
    int num_lines;  // 0, 1 or 2
};

// sums[r * kGroupOutputs + o] = sum over inputs of x[r] * weights[o]
template <class Reader, int kRows, int kPanels>
void sum_tile(const uint8_t* x, int64_t x_row_bytes, const uint8_t* panels, int64_t panel_bytes,
    int64_t num_units, Prefetch ahead, float* sums) {
    constexpr int kVectors = kPanels * kPanelVectors;
    using Scalar = typename Reader::Scalar;
    FloatLanes totals[kRows][kVectors] = {};
    for (int64_t u = 0; u < num_units; ++u) {
        typename Reader::Lanes lanes[kPanels][Reader::kSteps][kPanelVectors];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
            Reader::read(panels + p * panel_bytes + u * Reader::kUnitBytes, lanes[p]);
        }
        for (int line = 0; line < ahead.num_lines; ++line) prefetch(ahead.start + line * 64, 1);
        ahead.start += ahead.num_lines * 64;
#pragma GCC unroll 2
        for (int step = 0; step < Reader::kSteps; ++step) {
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                Scalar element;
                __builtin_memcpy(&element,
                    x + r * x_row_bytes + (u * Reader::kSteps + step) * sizeof(Scalar),
                    sizeof(Scalar));
                const auto factor = splat(element);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) {
                    totals[r][v] = multiply_add(totals[r][v], factor,
                        lanes[v / kPanelVectors][step][v % kPanelVectors]);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            store(sums + r * kGroupOutputs + v * kLanes, totals[r][v]);
        }
    }
}

using SumTileFunction = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, int64_t,
    Prefetch, float*);

// sum_tile for 1 to kTileRows rows, at [rows - 1].
template <class Reader, int kPanels>
struct SumTiles {
    SumTileFunction functions[kTileRows];

    template <int... kIndex>
    static constexpr SumTiles of(std::integer_sequence<int, kIndex...>) {
        return {{sum_tile<Reader, kIndex + 1, kPanels>...}};
    }
};

template <class Reader, int kPanels>
constexpr SumTiles<Reader, kPanels> kSumTiles =
    SumTiles<Reader, kPanels>::of(std::make_integer_sequence<int, kTileRows>{});

}  // namespace
}  // namespace pdserve::linear
