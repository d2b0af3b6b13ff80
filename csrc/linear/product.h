// Products of one work item: some rows of x by some groups of panels.
//
// A group is read from memory once: the rows that come after the first few find it in the cache.
// While one group is used, the next one is fetched, so that memory never waits for arithmetic.
//
// Never checks anything: launch.cpp has.
#pragma once

#include <utility>

#include "finish.h"
#include "kernel.h"
#include "tile.h"

namespace pdserve::linear {
namespace {

// Rows in pieces of nearly equal size: [first, first + count).
struct Piece {
    int64_t first;
    int count;
};

PDSERVE_INLINE int64_t num_pieces(int64_t num_rows) {
    return (num_rows + kTileRows - 1) / kTileRows;
}

PDSERVE_INLINE Piece piece_of(int64_t num_rows, int64_t pieces, int64_t index) {
    const int64_t first = num_rows * index / pieces;
    return {first, static_cast<int>(num_rows * (index + 1) / pieces - first)};
}

template <class Reader>
class Multiply {
public:
    Multiply(const Call& call, const WorkItem& item)
        : call_(call), item_(item), finish_(call), pieces_(num_pieces(item.num_rows)) {}

    void run() {
        const int64_t end = item_.first_group + item_.num_groups;
        for (int64_t group = item_.first_group; group < end; ++group) multiply_group(group);
    }

private:
    void multiply_group(int64_t group) {
        const Layout& layout = call_.layout;
        const int64_t first_panel = group * kGroupPanels;
        const int64_t panels_left = layout.num_panels - first_panel;
        const int num_panels = panels_left < kGroupPanels ? static_cast<int>(panels_left)
                                                          : kGroupPanels;
        const uint8_t* panels = call_.weights + first_panel * layout.panel_bytes;
        const uint8_t* next = panels + kGroupPanels * layout.panel_bytes;
        const uint8_t* const next_end = next + kGroupPanels * layout.panel_bytes;
        const int64_t pass_lines = lines_per_unit();
        for (int64_t i = 0; i < pieces_; ++i) {
            const Piece piece = piece_of(item_.num_rows, pieces_, i);
            alignas(64) float sums[kTileRows * kGroupOutputs];
            const uint8_t* x = static_cast<const uint8_t*>(call_.x)
                + (item_.first_row + piece.first) * call_.x_row_bytes;
            for (int p = 0; p < num_panels; p += kTilePanels) {
                const int lines = next < next_end ? static_cast<int>(pass_lines) : 0;
                const auto sum = num_panels - p >= kTilePanels
                    ? kSumTiles<Reader, kTilePanels>.functions[piece.count - 1]
                    : kSumTiles<Reader, 1>.functions[piece.count - 1];
                sum(x, call_.x_row_bytes, panels + p * layout.panel_bytes, layout.panel_bytes,
                    layout.num_units, {next, lines}, sums + p * kPanelOutputs);
                next += lines * 64 * layout.num_units;
            }
            finish_.run(sums, item_.first_row + piece.first, piece.count, group);
        }
    }

    // So many that the next group is there when this one is done.
    int64_t lines_per_unit() const {
        const int64_t passes = pieces_ * (kGroupPanels / kTilePanels);
        const int64_t lines = kGroupPanels * Reader::kUnitBytes / 64;
        return (lines + passes - 1) / passes;
    }

    const Call& call_;
    const WorkItem& item_;
    const Finish finish_;
    const int64_t pieces_;
};

template <class Reader>
void multiply_item(const Call& call, const WorkItem& item) {
    Multiply<Reader>(call, item).run();
}

}  // namespace
}  // namespace pdserve::linear
