// Products of one work item: some rows of x by some panels, a chunk of panels at a time.
//
// Few rows stream: memory decides how long they take, and it is enough to look a little ahead. Many
// rows find a chunk in the cache, and while they use it the next one is fetched, so that memory
// never waits for arithmetic. If there are so many that it pays, weights are widened only once.
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

// Rows that are done faster in one pass of 2 panels than in two passes of 4: measured. What has to
// be widened takes long enough at it that the second pass never pays.
constexpr int64_t kMinNarrowRows = kMaxStreamingRows + 1;
template <class Reader>
constexpr int64_t kMaxNarrowRows = Reader::kSteps == 1 ? 9 : 12;

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

// A chunk as its tiles read it.
struct Chunk {
    int64_t first_panel;
    int num_panels;
    const uint8_t* panels;
    int64_t panel_bytes;
    int64_t num_units;
};

template <class Reader>
class Multiply {
    // Of many rows.
    using WideReader = typename OneStep<typename Reader::Scalar>::Reader;

public:
    Multiply(const Call& call, const WorkItem& item, uint8_t* scratch)
        : call_(call), item_(item), scratch_(scratch), finish_(call) {}

    void run() {
        const bool is_streaming = item_.num_rows <= kMaxStreamingRows;
        const int64_t end = item_.first_panel + item_.num_panels;
        for (int64_t panel = item_.first_panel; panel < end;) {
            const int num_panels = chunk_panels(end - panel);
            const uint8_t* panels = call_.weights + panel * call_.layout.panel_bytes;
            const Chunk chunk{panel, num_panels, panels, call_.layout.panel_bytes,
                call_.layout.num_units};
            Fetch fetch(panels, num_panels * call_.layout.panel_bytes);
            if (is_streaming) {
                multiply_chunk<Reader, Ahead::kStream>(chunk, fetch);
            } else if (Reader::kSteps == 1 || item_.num_rows <= kMaxNarrowRows<Reader>) {
                multiply_chunk<Reader, Ahead::kNext>(chunk, fetch);
            } else {
                widen_chunk(chunk, fetch);
            }
            panel += num_panels;
        }
    }

private:
    // 4, 2 or 1: even where the matrix is gated.
    int chunk_panels(int64_t panels_left) const {
        const bool suits_rows =
            item_.num_rows < kMinNarrowRows || item_.num_rows > kMaxNarrowRows<Reader>;
        const bool fits = 4 * Reader::kSteps * call_.layout.panel_bytes <= kMaxChunkBytes;
        if (kLanes == 16 && panels_left >= 4 && suits_rows && fits) return 4;
        return panels_left >= 2 ? 2 : 1;
    }

    template <class TileReader, Ahead kAhead>
    void multiply_chunk(const Chunk& chunk, Fetch& fetch) const {
        const int64_t num_pieces = pieces_for(chunk);
        for (int64_t i = 0; i < num_pieces; ++i) {
            multiply_piece<TileReader, kAhead>(chunk, fetch, i, num_pieces);
        }
    }

    // The first rows widen the weights as they use them, beside the products' arithmetic; the
    // others use what those have left in the cache.
    void widen_chunk(const Chunk& chunk, Fetch& fetch) const {
        const Chunk wide{chunk.first_panel, chunk.num_panels, scratch_,
            chunk.panel_bytes * Reader::kSteps, chunk.num_units * Reader::kSteps};
        const int64_t num_pieces = pieces_for(chunk);
        multiply_piece<Reader, Ahead::kWiden>(chunk, fetch, 0, num_pieces);
        for (int64_t i = 1; i < num_pieces; ++i) {
            multiply_piece<WideReader, Ahead::kNext>(wide, fetch, i, num_pieces);
        }
    }

    // Of rows, as many as a tile holds.
    int64_t pieces_for(const Chunk& chunk) const {
        const int max_rows = max_tile_rows(tile_panels(chunk));
        return (item_.num_rows + max_rows - 1) / max_rows;
    }

    static int tile_panels(const Chunk& chunk) {
        return chunk.num_panels < kWidestTile ? chunk.num_panels : kWidestTile;
    }

    template <class TileReader, Ahead kAhead>
    void multiply_piece(
        const Chunk& chunk, Fetch& fetch, int64_t piece, int64_t num_pieces) const {
        // Pieces of nearly equal size, larger ones first.
        const auto start = [&](int64_t i) {
            return (item_.num_rows * i + num_pieces - 1) / num_pieces;
        };
        const int64_t first_row = start(piece);
        const int num_rows = static_cast<int>(start(piece + 1) - first_row);
        const int64_t row = item_.first_row + first_row;
        alignas(64) float sums[kMaxTileRows * kSumStride];
        Tile tile{};
        tile.x = static_cast<const uint8_t*>(call_.x) + row * call_.x_row_bytes;
        tile.x_row_bytes = call_.x_row_bytes;
        tile.panel_bytes = chunk.panel_bytes;
        tile.num_units = chunk.num_units;
        tile.widened_panel_bytes = chunk.panel_bytes * TileReader::kSteps;
        const int num_panels = tile_panels(chunk);
        const auto sum_tile = pick_tile<TileReader, kAhead>(num_rows, num_panels);
        for (int p = 0; p < chunk.num_panels; p += num_panels) {
            tile.panels = chunk.panels + p * chunk.panel_bytes;
            if constexpr (kAhead == Ahead::kWiden) {
                tile.widened = scratch_ + p * tile.widened_panel_bytes;
            }
            tile.sums = sums + p * kPanelOutputs;
            if constexpr (kAhead == Ahead::kStream) {
                tile.next = tile.panels + num_panels * chunk.panel_bytes;
            } else {
                fetch.take(tile);
            }
            sum_tile(tile);
        }
        finish_.run(sums, row, num_rows, chunk.first_panel, chunk.num_panels);
    }

    const Call& call_;
    const WorkItem& item_;
    uint8_t* const scratch_;
    const Finish finish_;
};

template <class Reader>
void multiply_item(const Call& call, const WorkItem& item, uint8_t* scratch) {
    Multiply<Reader>(call, item, scratch).run();
}

}  // namespace
}  // namespace pdserve::linear
