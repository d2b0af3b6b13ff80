// Products through tiles (isa/amx.h), for x of bfloat16 and weights of bfloat16 or fp8.
//
// 16 units of a panel are a tile of weights already; x is converted to tiles by tile_rows. A sum is
// one chain over the tiles of the inputs, in ascending order, whatever is computed beside it. Where
// the chain is interrupted, the sum is stored and loaded again, which does not round it. So a row's
// result does not depend on other rows, bit for bit.
//
// With few rows, memory bandwidth is the limit. One row is multiplied by vectors, to the same bits
// (one_row.h); else 4 panels are streamed side by side. With more, 2
// panels by 2 tiles of rows share their loads, and the next panels are fetched meanwhile. The
// inputs are cut into pieces, so that a piece of the panels stays in the L1 cache for all rows.
// Weights of fp8 are widened in the first pass over them, one tile ahead of its use.

#include "../../isa/amx.h"
#include "../../isa/build_name.h"
#include "fetch.h"
#include "finish.h"
#include "kernel.h"
#include "one_row.h"

namespace pdserve::linear {
namespace {

// Up to this many rows, memory bandwidth is the limit.
constexpr int kFewRows = 32;

constexpr int kTilesInPiece = 8;  // of a panel
constexpr int64_t kStreamAhead = 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Consecutive panels as tiles of bfloat16: panel p's tile k is at panels + p * panel_bytes + k *
// kTileBytes. If the inputs do not fill the last tile, it is elsewhere, padded with zeros.
struct Chunk {
    int64_t first_panel;
    const uint8_t* panels;
    int64_t panel_bytes;
    int64_t num_whole;          // tiles of a panel
    const uint8_t* last_tiles;  // one for each panel; null if all are whole

    const uint8_t* tile(int panel, int64_t k) const {
        return k < num_whole ? panels + panel * panel_bytes + k * kTileBytes
                             : last_tiles + panel * kTileBytes;
    }
};

// 32 inputs of a panel of bytes, as bfloat16, which what each stands for is exactly.
template <WeightType kType>
PDSERVE_INLINE void widen_tile(const uint8_t* units, uint8_t* tile) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 16
    for (int i = 0; i < 8 * ReadBytePairs<kType>::kSteps; ++i) {
        PairLanes lanes[1];
        ReadBytePairs<kType>::read(units + i / 2 * kUnitBytes, i % 2, lanes);
        store(tile + i * kTileRowBytes, lanes[0]);
    }
#else
    for (int i = 0; i < 8 * kUnitBytes; ++i) {
        const int unit = i / kUnitBytes, lane = i % kUnitBytes / 4, input = i % 4;
        BFloat16 exact;
        assign(exact, number_of<kType>(splat(uint32_t{units[i]}))[0]);
        const int at = (2 * unit + input / 2) * kTileRowBytes + (2 * lane + input % 2) * 2;
        __builtin_memcpy(tile + at, &exact, sizeof(exact));
    }
#endif
}

template <WeightType kType>
class TileMultiply {
    static constexpr bool kIsBytes = traits_of(kType).unit_inputs == 4;
    static constexpr int kUnitsInTile = kTileInputs / traits_of(kType).unit_inputs;

public:
    TileMultiply(const Call& call, const WorkItem& item, uint8_t* scratch)
        : call_(call),
          scratch_(scratch),
          finish_(call),
          num_tiles_(ceil_div(call.layout.num_units, kUnitsInTile)),
          first_row_(item.first_row),
          num_rows_(item.num_rows),
          x_(static_cast<const uint8_t*>(call.x) + item.first_row / kTileRows * x_tile_bytes()) {}

    void run(int64_t first_panel, int64_t num_panels) {
        const int64_t end = first_panel + num_panels;
        while (first_panel < end) {
            const int64_t left = end - first_panel;
#if defined(__AMX_BF16__)
            if (num_rows_ == 1) {
                first_panel = left == 1 ? multiply_one_row<1>(first_panel)
                    : left < 4          ? multiply_one_row<2>(first_panel)
                                        : multiply_one_row<4>(first_panel);
                continue;
            }
#endif
            if (left == 1) {
                first_panel = multiply<1, 1, kMostTileRows>(first_panel);
            } else if (num_rows_ <= kFewRows && left >= 4) {
                first_panel = multiply<4, 1, kFewRows>(first_panel);
            } else {
                first_panel = multiply<2, 2, kMostTileRows>(first_panel);
            }
        }
    }

private:
    int64_t x_tile_bytes() const { return num_tiles_ * kTileBytes; }  // 16 rows, all inputs

    template <int kPanels>
    Chunk chunk_at(int64_t first_panel) {
        const Layout& layout = call_.layout;
        const uint8_t* panels = call_.weights + first_panel * layout.panel_bytes;
        const int64_t num_whole = layout.num_units / kUnitsInTile;
        const int64_t units_left = layout.num_units % kUnitsInTile;
        if constexpr (kIsBytes) {
            return {first_panel, scratch_, num_tiles_ * kTileBytes, num_tiles_, nullptr};
        }
        for (int p = 0; p < kPanels && units_left > 0; ++p) {
            uint8_t* last = scratch_ + p * kTileBytes;
            const uint8_t* units = panels + p * layout.panel_bytes + num_whole * kTileBytes;
            __builtin_memset(last, 0, kTileBytes);
            __builtin_memcpy(last, units, units_left * kUnitBytes);
        }
        return {first_panel, panels, layout.panel_bytes, num_whole, scratch_};
    }

    // Widens tile k of kPanels panels.
    template <int kPanels>
    PDSERVE_INLINE void widen(int64_t first_panel, int64_t k) {
        const Layout& layout = call_.layout;
        const int64_t left = layout.num_units - k * kUnitsInTile;
        const uint8_t* units =
            call_.weights + first_panel * layout.panel_bytes + k * kUnitsInTile * kUnitBytes;
        uint8_t* wide = scratch_ + k * kTileBytes;
        for (int p = 0; p < kPanels; ++p) {
            prefetch(units + kStreamAhead, kUnitsInTile * kUnitBytes);
            if (left >= kUnitsInTile) {
                widen_tile<kType>(units, wide);
            } else {
                alignas(64) uint8_t padded[kUnitsInTile * kUnitBytes] = {};
                __builtin_memcpy(padded, units, left * kUnitBytes);
                widen_tile<kType>(padded, wide);
            }
            units += layout.panel_bytes;
            wide += num_tiles_ * kTileBytes;
        }
    }

#if defined(__AMX_BF16__)
    template <int kPanels>
    int64_t multiply_one_row(int64_t first_panel) {
        alignas(64) float sums[kPanels * kPanelOutputs];
        const uint8_t* panels = call_.weights + first_panel * call_.layout.panel_bytes;
        multiply_row<kType, kPanels>(x_, panels, call_.layout, sums);
        finish_.run(sums, kPanels * kPanelOutputs, first_row_, 1, first_panel, kPanels);
        return first_panel + kPanels;
    }
#endif

    // Multiplies kPanels panels; returns the next one. The sums of kRows tiles of rows are in
    // registers together.
    template <int kPanels, int kRows, int kMostRows>
    int64_t multiply(int64_t first_panel) {
        const Chunk chunk = chunk_at<kPanels>(first_panel);
        const int64_t row_tiles = ceil_div(num_rows_, kTileRows);
        const int64_t chunk_bytes = kPanels * call_.layout.panel_bytes;
        Fetch fetch(
            call_.weights + first_panel * call_.layout.panel_bytes + chunk_bytes, chunk_bytes);
        constexpr int kStride = kPanels * kPanelOutputs;
        alignas(64) float sums[kMostRows * kStride];
        const int64_t in_piece = row_tiles == 1 ? num_tiles_ : kTilesInPiece;
        for (int64_t first = 0; first < num_tiles_; first += in_piece) {
            const int64_t end = num_tiles_ - first < in_piece ? num_tiles_ : first + in_piece;
            if constexpr (kIsBytes) widen<kPanels>(first_panel, first);
            for (int64_t row_tile = 0; row_tile < row_tiles; row_tile += kRows) {
                const Piece piece{row_tile, first, end, sums + row_tile * kTileRows * kStride};
                if (row_tile + kRows <= row_tiles) {
                    add_piece<kRows, kPanels>(chunk, piece, fetch);
                } else {
                    add_piece<1, kPanels>(chunk, piece, fetch);
                }
            }
        }
        finish_.run(sums, kStride, first_row_, num_rows_, first_panel, kPanels);
        return first_panel + kPanels;
    }

    // Tiles [first, end) of the inputs of some rows.
    struct Piece {
        int64_t row_tile;
        int64_t first;
        int64_t end;
        float* sums;
    };

    // Adds the piece's products to the sums, or begins the sums with them.
    template <int kRows, int kPanels>
    PDSERVE_INLINE void add_piece(const Chunk& chunk, const Piece& piece, Fetch& fetch) {
        constexpr int kStride = kPanels * kPanelOutputs;
        constexpr int kX = kRows * kPanels, kWeights = kX + kRows;  // the first registers of each
        const auto sums_of = [&](int i) {
            return piece.sums + i / kPanels * kTileRows * kStride + i % kPanels * kPanelOutputs;
        };
        unrolled<kRows * kPanels>([&](auto i) {
            if (piece.first == 0) {
                tiles_.zero<i>();
            } else {
                tiles_.load<i>(sums_of(i), kStride * sizeof(float));
            }
        });
        const bool is_first_pass = piece.row_tile == 0;
        // After its last tiles, a stream goes on in the next panels.
        const int64_t near_end = chunk.num_whole - kStreamAhead / kTileBytes;
        const int64_t after_end = kStreamAhead + (kPanels - 1) * chunk.panel_bytes;
        const uint8_t* x = x_ + piece.row_tile * x_tile_bytes() + piece.first * kTileBytes;
        for (int64_t k = piece.first; k < piece.end; ++k, x += kTileBytes) {
            if constexpr (kIsBytes) {
                if (is_first_pass && k + 1 < piece.end) widen<kPanels>(chunk.first_panel, k + 1);
            }
            if (!kIsBytes && kRows > 1) fetch.take_turn();
            unrolled<kRows>(
                [&](auto r) { tiles_.load<kX + r>(x + r * x_tile_bytes(), kTileRowBytes); });
            unrolled<kPanels>([&](auto p) {
                constexpr int weights = kWeights + p % (8 - kWeights);
                const uint8_t* tile = chunk.tile(p, k);
                if (!kIsBytes && kRows == 1 && is_first_pass) {
                    prefetch(tile + (k < near_end ? kStreamAhead : after_end), kTileBytes);
                }
                tiles_.load<weights>(tile, kTileRowBytes);
                unrolled<kRows>([&](auto r) {
                    tiles_.multiply_bfloat16<r * kPanels + p, kX + r, weights>();
                });
            });
        }
        unrolled<kRows * kPanels>(
            [&](auto i) { tiles_.store<i>(sums_of(i), kStride * sizeof(float)); });
    }

    const Call& call_;
    uint8_t* const scratch_;
    const Finish finish_;
    const int64_t num_tiles_;  // of a panel, and of a row of x
    const int64_t first_row_;
    const int64_t num_rows_;
    const uint8_t* const x_;
    Tiles tiles_;
};

template <WeightType kType>
void multiply_item(const Call& call, const WorkItem& item, uint8_t* scratch) {
    TileMultiply<kType>(call, item, scratch).run(item.first_panel, item.num_panels);
}

// Rows of x, [16 rows, padded], as tiles [padded / 32] of [16][32]; both padded with zeros.
void tile_rows(const Rows& rows, int64_t num_in, int64_t padded, void* target) {
    for (int64_t first = 0; first < padded; first += kTileInputs) {
        auto* tile = static_cast<uint8_t*>(target) + first / kTileInputs * kTileBytes;
        const int64_t left = num_in - first;
        for (int64_t r = 0; r < kTileRows; ++r, tile += kTileRowBytes) {
            const auto* from = static_cast<const BFloat16*>(rows.start) + r * rows.stride + first;
            if (r >= rows.count) {
                __builtin_memset(tile, 0, kTileRowBytes);
            } else if (left >= kTileInputs) {
                __builtin_memcpy(tile, from, kTileRowBytes);
            } else {
                __builtin_memset(tile, 0, kTileRowBytes);
                __builtin_memcpy(tile, from, left * sizeof(BFloat16));
            }
        }
    }
}

}  // namespace

const TileKernels PDSERVE_OF_THIS_BUILD(TileKernels) = {
    .by_tiles = {nullptr, multiply_item<WeightType::kBFloat16>, nullptr,
        multiply_item<WeightType::kFp8>},
    .tile_rows = tile_rows,
};

}  // namespace pdserve::linear
