// Products of one work item: some rows of x by some panels, a chunk of panels at a time.
//
// A chunk is read from memory once: the rows that come after the first few find it in the cache.
// While one chunk is used, the next one is fetched, so that memory never waits for arithmetic.
//
// Never checks anything: launch.cpp has.
#pragma once

#include "finish.h"
#include "kernel.h"
#include "tile.h"

namespace pdserve::linear {
namespace {

// Two chunks, and rows of x, are to fit into the L2 cache.
constexpr int64_t kMaxChunkBytes = 400 << 10;

template <class Reader>
class Multiply {
public:
    Multiply(const Call& call, const WorkItem& item) : call_(call), item_(item), finish_(call) {}

    void run() {
        const int64_t end = item_.first_panel + item_.num_panels;
        for (int64_t panel = item_.first_panel; panel < end;) {
            const int num_panels = chunk_panels(end - panel);
            multiply_chunk(panel, num_panels);
            panel += num_panels;
        }
    }

private:
    // 4, 2 or 1: even where the matrix is gated.
    int chunk_panels(int64_t panels_left) const {
        const bool suits_rows = item_.num_rows <= max_tile_rows(4)
            || item_.num_rows > max_tile_rows(2);
        const bool fits = 4 * call_.layout.panel_bytes <= kMaxChunkBytes;
        if (kWidestTile == 4 && panels_left >= 4 && suits_rows && fits) return 4;
        return panels_left >= 2 ? 2 : 1;
    }

    void multiply_chunk(int64_t first_panel, int num_panels) {
        const Layout& layout = call_.layout;
        const int tile_panels = num_panels < kWidestTile ? num_panels : kWidestTile;
        const int max_rows = max_tile_rows(tile_panels);
        const int64_t num_pieces = (item_.num_rows + max_rows - 1) / max_rows;
        const int64_t num_passes = num_pieces * (num_panels / tile_panels);
        const uint8_t* panels = call_.weights + first_panel * layout.panel_bytes;
        Fetch next(panels + num_panels * layout.panel_bytes, num_panels, num_passes);
        alignas(64) float sums[kMaxTileRows * kSumStride];
        for (int64_t i = 0; i < num_pieces; ++i) {
            // Pieces of nearly equal size.
            const int64_t first_row = item_.num_rows * i / num_pieces;
            const int num_rows =
                static_cast<int>(item_.num_rows * (i + 1) / num_pieces - first_row);
            const int64_t row = item_.first_row + first_row;
            const auto* x = static_cast<const uint8_t*>(call_.x) + row * call_.x_row_bytes;
            const auto sum = sum_tile_for<Reader>(num_rows, tile_panels);
            for (int p = 0; p < num_panels; p += tile_panels) {
                sum(x, call_.x_row_bytes, panels + p * layout.panel_bytes, layout.panel_bytes,
                    layout.num_units, next.take(layout.num_units), sums + p * kPanelOutputs);
            }
            finish_.run(sums, row, num_rows, first_panel, num_panels);
        }
    }

    // The lines of the next chunk, shared out among the passes over the inputs of this one.
    class Fetch {
    public:
        Fetch(const uint8_t* start, int num_panels, int64_t num_passes) : next_(start) {
            const int64_t lines = (num_panels * Reader::kUnitBytes + 63) / 64;
            lines_per_unit_ = static_cast<int>((lines + num_passes - 1) / num_passes);
            passes_left_ = (lines + lines_per_unit_ - 1) / lines_per_unit_;
        }

        Prefetch take(int64_t num_units) {
            const Prefetch ahead{next_, passes_left_ > 0 ? lines_per_unit_ : 0};
            next_ += num_units * ahead.num_lines * 64;
            --passes_left_;
            return ahead;
        }

    private:
        const uint8_t* next_;
        int lines_per_unit_;
        int64_t passes_left_;
    };

    const Call& call_;
    const WorkItem& item_;
    const Finish finish_;
};

template <class Reader>
void multiply_item(const Call& call, const WorkItem& item) {
    Multiply<Reader>(call, item).run();
}

}  // namespace
}  // namespace pdserve::linear
