// Chooses the compiled tile for a number of rows and panels.
#pragma once

#include <type_traits>
#include <utility>

#include "matrix_tile.h"
#include "tile.h"

namespace pdserve::linear {
namespace {

using SumTileFunction = void (*)(const Tile&);

template <class Reader, int kRows, int kPanels, Ahead kAhead>
constexpr SumTileFunction sum_of() {
#if defined(PDSERVE_HAS_PAIRS) && defined(__aarch64__)
    if constexpr (std::is_same_v<typename Reader::Lanes, PairLanes>) {
        return sum_matrix_tile<Reader, kRows, kAhead>;
    }
#endif
    return sum_tile<Reader, kRows, kPanels, kAhead>;
}

// sum_of for 1 to N rows, at [rows - 1].
template <class Reader, int kPanels, Ahead kAhead, int... kIndex>
SumTileFunction pick_rows(int num_rows, std::integer_sequence<int, kIndex...>) {
    static constexpr SumTileFunction kFunctions[] = {
        sum_of<Reader, kIndex + 1, kPanels, kAhead>()...};
    return kFunctions[num_rows - 1];
}

template <class Reader, int kPanels, Ahead kAhead>
SumTileFunction pick_panels(int num_rows) {
    constexpr int kRows = max_tile_rows(kPanels);
    constexpr int kFewRows = kRows < kMaxStreamingRows ? kRows : kMaxStreamingRows;
    return pick_rows<Reader, kPanels, kAhead>(num_rows,
        std::make_integer_sequence<int, kAhead == Ahead::kStream ? kFewRows : kRows>{});
}

template <class Reader, Ahead kAhead>
SumTileFunction pick_tile(int num_rows, int num_panels) {
    if constexpr (kWidestTile == 4) {
        if (num_panels == 4) return pick_panels<Reader, 4, kAhead>(num_rows);
        if (num_panels == 2) return pick_panels<Reader, 2, kAhead>(num_rows);
    }
    return pick_panels<Reader, 1, kAhead>(num_rows);
}

}  // namespace
}  // namespace pdserve::linear
