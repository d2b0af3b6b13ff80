// The product of one work item: out [num_rows, num_out] = x [num_rows, num_in] times a packed
// matrix (../layout.h), for some rows and panels, a chunk of panels at a time.
//
// With few rows, memory bandwidth is the limit: weights are streamed once, and fetched some way
// ahead. With many rows, a chunk of panels is used from the L2 cache by all of them, and the next
// chunk is fetched meanwhile (cache blocking as in GotoBLAS). With enough rows, weights are widened
// only once.
//
// ../launch.cpp has checked all arguments.
#pragma once

#include "finish.h"
#include "kernel.h"
#include "pick_tile.h"
#include "tile.h"

namespace pdserve::linear {
namespace {

// Two chunks and some rows of x should fit into the L2 cache.
constexpr int64_t kMaxChunkBytes = 400 << 10;

// Numbers of rows for which passes over 2 panels, of 12 rows, are fewer than over 4, and faster, as
// measured. Weights that must be widened take so long that a second pass never pays off; with 8
// lanes, those of bfloat16 are widened as fast as they are read, while bytes take still longer.
constexpr int64_t kMinNarrowRows = max_tile_rows(4) + 1;
template <class Reader>
constexpr int64_t kMaxNarrowRows = Reader::kSteps == 1 ? 24
    : kLanes == 8 && Reader::kSteps > 2                ? kMaxStreamingRows
                                                       : 12;

// Prefetches the next chunk: a line for each unit of this one, until all have been requested. More
// at a time would be waited for. It is enough: there are at least as many passes as panels in a
// tile, or each unit is read in several steps.
class Fetch {
public:
    Fetch(const uint8_t* chunk, int64_t chunk_bytes)
        : next_(chunk + chunk_bytes), end_(next_ + chunk_bytes) {}

    void take(Tile& tile) {
        const bool has_more = next_ < end_;
        tile.next = has_more ? next_ : tile.panels;
        tile.next_step = has_more ? kUnitBytes : 0;
        next_ += tile.num_units * tile.next_step;
    }

private:
    const uint8_t* next_;
    const uint8_t* const end_;
};

// A chunk of panels, as its tiles read it.
struct Chunk {
    int64_t first_panel;
    int num_panels;
    const uint8_t* panels;
    int64_t panel_bytes;
    int64_t num_units;
};

template <class Reader>
class Multiply {
    // The reader for many rows, whose weights have been widened.
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
    // 4, 2 or 1 panels per tile; even if the matrix is gated.
    int chunk_panels(int64_t panels_left) const {
        const bool suits_rows =
            item_.num_rows < kMinNarrowRows || item_.num_rows > kMaxNarrowRows<Reader>;
        const bool fits = 4 * Reader::kSteps * call_.layout.panel_bytes <= kMaxChunkBytes;
        if (kLanes == 16 && panels_left >= 4 && suits_rows && fits) return 4;
        return panels_left >= 2 ? 2 : 1;
    }

    template <class TileReader, Ahead kAhead>
    void multiply_chunk(const Chunk& chunk, Fetch& fetch) const {
        const int64_t num_pieces = pieces_for<TileReader, kAhead>(chunk);
        for (int64_t i = 0; i < num_pieces; ++i) {
            multiply_piece<TileReader, kAhead>(chunk, fetch, i, num_pieces);
        }
    }

    // The first piece of rows widens the weights while it uses them; the other pieces use the
    // widened weights from the cache.
    void widen_chunk(const Chunk& chunk, Fetch& fetch) const {
        const Chunk wide{chunk.first_panel, chunk.num_panels, scratch_,
            chunk.panel_bytes * Reader::kSteps, chunk.num_units * Reader::kSteps};
        const int64_t num_pieces = pieces_for<WideReader, Ahead::kNext>(chunk);
        multiply_piece<Reader, Ahead::kWiden>(chunk, fetch, 0, num_pieces);
        for (int64_t i = 1; i < num_pieces; ++i) {
            multiply_piece<WideReader, Ahead::kNext>(wide, fetch, i, num_pieces);
        }
    }

    // Number of pieces of rows, each of which fits into a tile. Of 16 registers, one has a mask if
    // bfloat16 is widened: the sums of a sixth row would not stay in them, which is worth it only
    // if the weights are then streamed once.
    template <class TileReader, Ahead kAhead>
    int64_t pieces_for(const Chunk& chunk) const {
        const bool has_mask = kLanes == 8 && TileReader::kSteps == 2 && kAhead == Ahead::kNext;
        const int max_rows = max_tile_rows(tile_panels(chunk)) - has_mask;
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
        finish_.run(sums, kSumStride, row, num_rows, chunk.first_panel, chunk.num_panels);
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
