// Products of one work item: some rows of x by some panels, a chunk of panels at a time.
//
// A chunk is read from memory once: the rows that come after the first few find it in the cache.
// Where several rows use it, the next chunk is fetched meanwhile, so that memory never waits for
// arithmetic; where a few do, all is over so soon that it is enough to look a little ahead.
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

// Rows that are done faster in one pass of 2 panels than in two passes of 4.
constexpr int64_t kMinNarrowRows = 7, kMaxNarrowRows = 9;

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
        const bool suits_rows =
            item_.num_rows < kMinNarrowRows || item_.num_rows > kMaxNarrowRows;
        const bool fits = 4 * call_.layout.panel_bytes <= kMaxChunkBytes;
        if (kWidestTile == 4 && panels_left >= 4 && suits_rows && fits) return 4;
        return panels_left >= 2 ? 2 : 1;
    }

    void multiply_chunk(int64_t first_panel, int num_panels) {
        const Layout& layout = call_.layout;
        const int tile_panels = num_panels < kWidestTile ? num_panels : kWidestTile;
        const int max_rows = max_tile_rows(tile_panels);
        const int64_t num_pieces = (item_.num_rows + max_rows - 1) / max_rows;
        const Ahead ahead =
            item_.num_rows <= kMaxStreamingRows ? Ahead::kStream : Ahead::kNext;
        alignas(64) float sums[kMaxTileRows * kSumStride];
        Tile tile{};
        tile.x_row_bytes = call_.x_row_bytes;
        tile.panel_bytes = layout.panel_bytes;
        tile.num_units = layout.num_units;
        const uint8_t* panels = call_.weights + first_panel * layout.panel_bytes;
        Fetch fetch(panels, num_panels * layout.panel_bytes);
        for (int64_t i = 0; i < num_pieces; ++i) {
            // Pieces of nearly equal size.
            const int64_t first_row = item_.num_rows * i / num_pieces;
            const int num_rows =
                static_cast<int>(item_.num_rows * (i + 1) / num_pieces - first_row);
            const int64_t row = item_.first_row + first_row;
            tile.x = static_cast<const uint8_t*>(call_.x) + row * call_.x_row_bytes;
            const auto sum_tile = pick_tile<Reader>(num_rows, tile_panels, ahead);
            for (int p = 0; p < num_panels; p += tile_panels) {
                tile.panels = panels + p * layout.panel_bytes;
                tile.sums = sums + p * kPanelOutputs;
                fetch.take(tile);
                sum_tile(tile);
            }
            finish_.run(sums, row, num_rows, first_panel, num_panels);
        }
    }

    // The lines of the next chunk, two for each unit of this one until they are all on their way.
    class Fetch {
    public:
        Fetch(const uint8_t* chunk, int64_t chunk_bytes)
            : next_(chunk + chunk_bytes), end_(next_ + chunk_bytes) {}

        void take(Tile& tile) {
            const bool has_more = next_ < end_;
            tile.next = has_more ? next_ : tile.panels;
            tile.next_step = has_more ? 128 : 0;
            next_ += tile.num_units * tile.next_step;
        }

    private:
        const uint8_t* next_;
        const uint8_t* const end_;
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
