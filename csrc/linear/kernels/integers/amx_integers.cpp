// Products of integers (integers.h) through tiles, of many rows and int8.
//
// 16 rows of x are [inputs / 64] pairs of tiles: q = 256 * upper + lower, which are signed. 64
// inputs of a panel are a tile already. Their products' sums are of 32 bits and never too large
// over a piece of kUnscaledInputs, during which two panels and two pairs of sums are in registers.
// With more rows than one tile has, all of them use a piece of the panels while it is in the L1
// cache.

#include "../../../isa/amx.h"
#include "../../../isa/build_name.h"
#include "../fetch.h"
#include "../finish.h"
#include "quantise.h"

namespace pdserve::linear {
namespace {

constexpr int kPanels = 2;  // together
constexpr int kStride = kPanels * kPanelOutputs;
constexpr int kUnitsInTile = kTileBytes / kUnitBytes;
constexpr int kTilesInPiece = kUnscaledInputs / kByteTileInputs;
constexpr int64_t kStreamAhead = 2048;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where 16 rows of x are, and what follows their tiles: of each piece -zero times the sums of q of
// the 16 rows; their scales.
struct RowTile {
    RowTile(const void* x, int64_t row_bytes, int64_t num_blocks)
        : num_tiles(ceil_div(num_blocks * kBlockInputs, kByteTileInputs)),
          num_pieces(ceil_div(num_tiles, kTilesInPiece)),
          start(static_cast<uint8_t*>(const_cast<void*>(x))),
          bytes(kTileRows * row_bytes) {}

    uint8_t* tiles(int64_t k) const { return start + k * 2 * kTileBytes; }
    int32_t* zero_sums(int64_t piece) const {
        return reinterpret_cast<int32_t*>(tiles(num_tiles)) + piece * kTileRows;
    }
    float* scales() const { return reinterpret_cast<float*>(zero_sums(num_pieces)); }
    RowTile at(int64_t index) const {
        RowTile other = *this;
        other.start += index * bytes;
        return other;
    }

    int64_t num_tiles;
    int64_t num_pieces;
    uint8_t* start;
    int64_t bytes;  // of 16 rows
};

class TileIntegers {
public:
    TileIntegers(const Call& call, const WorkItem& item, uint8_t* scratch)
        : call_(call),
          item_(item),
          num_units_(call.layout.num_units),
          x_(RowTile(call.x, call.x_row_bytes, num_units_ * 4 / kBlockInputs)
                  .at(item.first_row / kTileRows)),
          last_tiles_(scratch),
          finish_(call) {}

    void run() {
        const int64_t end = item_.first_panel + item_.num_panels;
        for (int64_t panel = item_.first_panel; panel < end; panel += kPanels) {
            end - panel >= kPanels ? multiply<kPanels>(panel) : multiply<1>(panel);
        }
    }

private:
    const uint8_t* panel_at(int64_t panel) const {
        return call_.weights + panel * call_.layout.panel_bytes;
    }

    template <int kCount>
    void multiply(int64_t panel) {
        const int64_t units_left = num_units_ % kUnitsInTile;
        for (int p = 0; p < kCount && units_left > 0; ++p) {
            // What is multiplied by zeros may be anything, but must be readable.
            __builtin_memcpy(last_tiles_ + p * kTileBytes,
                panel_at(panel + p) + (num_units_ - units_left) * kUnitBytes,
                units_left * kUnitBytes);
        }
        const int64_t row_tiles = ceil_div(item_.num_rows, kTileRows);
        const int64_t chunk_bytes = kCount * call_.layout.panel_bytes;
        Fetch fetch(panel_at(panel) + chunk_bytes, row_tiles == 1 ? 0 : chunk_bytes);
        alignas(64) float sums[kMostTileRows * kStride];
        Products products[2];
        Pending before{0, x_, nullptr, nullptr};
        int turn = 0;
        for (int64_t piece = 0; piece < x_.num_pieces; ++piece) {
            for (int64_t i = 0; i < row_tiles; ++i, turn ^= 1) {
                const Pending now{piece, x_.at(i), &products[turn], sums + i * kTileRows * kStride};
                compute<kCount>(panel, now, fetch, i == 0);
                if (before.sums != nullptr) add<kCount>(before);
                before = now;
            }
        }
        add<kCount>(before);
        finish_.run(sums, kStride, item_.first_row, item_.num_rows, panel, kCount);
    }

    struct Products {
        alignas(64) int32_t of[2 * kPanels][kTileRows * kPanelOutputs];
    };

    // Products of 16 rows in a piece, to be added to the sums. What tiles store cannot be read at
    // once, so this is done while the next ones are computed.
    struct Pending {
        int64_t piece;
        RowTile x;
        Products* products;
        float* sums;
    };

    template <int kCount>
    PDSERVE_INLINE void compute(
        int64_t panel, const Pending& now, Fetch& fetch, bool is_first_pass) {
        constexpr int kX = 2 * kPanels, kWeights = kX + 2;  // the first registers of each
        const RowTile& x = now.x;
        unrolled<2 * kCount>([&](auto i) { tiles_.zero<i>(); });
        const int64_t num_whole = num_units_ / kUnitsInTile;
        const int64_t first = now.piece * kTilesInPiece;
        const int64_t left = x.num_tiles - first;
        const int64_t end = first + (left < kTilesInPiece ? left : kTilesInPiece);
        for (int64_t k = first; k < end; ++k) {
            fetch.take_turn();
            tiles_.load<kX>(x.tiles(k), kTileRowBytes);
            tiles_.load<kX + 1>(x.tiles(k) + kTileBytes, kTileRowBytes);
            unrolled<kCount>([&](auto p) {
                const uint8_t* weights = k < num_whole ? panel_at(panel + p) + k * kTileBytes
                                                       : last_tiles_ + p * kTileBytes;
                if (is_first_pass) prefetch(weights + kStreamAhead, kTileBytes);
                tiles_.load<kWeights + p>(weights, kTileRowBytes);
                tiles_.multiply_bytes<2 * p, kX, kWeights + p>();
                tiles_.multiply_bytes<2 * p + 1, kX + 1, kWeights + p>();
            });
        }
        unrolled<2 * kCount>(
            [&](auto i) { tiles_.store<i>(now.products->of[i], kTileRowBytes); });
    }

    template <int kCount>
    PDSERVE_INLINE static void add(const Pending& before) {
        const RowTile& x = before.x;
        const int64_t piece = before.piece;
        const bool is_last = piece + 1 == x.num_pieces;
        const auto& products = before.products->of;
        float* sums = before.sums;
        for (int r = 0; r < kTileRows; ++r, sums += kStride) {
            const IntLanes zero_sum = x.zero_sums(piece)[r] - IntLanes{};
#pragma GCC unroll 2
            for (int p = 0; p < kCount; ++p) {
                const auto upper = load_as<IntLanes>(products[2 * p] + r * kPanelOutputs);
                const auto lower = load_as<IntLanes>(products[2 * p + 1] + r * kPanelOutputs);
                const IntLanes sum = (upper << 8) + (lower + zero_sum);
                FloatLanes y = __builtin_convertvector(sum, FloatLanes);
                float* target = sums + p * kPanelOutputs;
                if (piece > 0) y = load(target) + y;
                if (is_last) y = y * splat(x.scales()[r]);
                store(target, y);
            }
        }
    }

    const Call& call_;
    const WorkItem& item_;
    const int64_t num_units_;
    const RowTile x_;
    uint8_t* const last_tiles_;
    const Finish finish_;
    Tiles tiles_;
};

void multiply_item(const Call& call, const WorkItem& item, uint8_t* scratch) {
    TileIntegers(call, item, scratch).run();
}

PDSERVE_INLINE void put_bytes(uint8_t* target, IntLanes lanes) {
#if defined(__AVX512F__)
    store(target, _mm512_cvtepi32_epi8((__m512i)lanes));
#else
    for (int i = 0; i < kLanes; ++i) target[i] = static_cast<uint8_t>(lanes[i]);
#endif
}

void tile_row(const BFloat16* row, int64_t num_in, int64_t num_blocks, int zero, int r,
    const RowTile& tile) {
    // Until then, the numbers of blocks are where their bytes will be.
    const auto bytes_at = [&](int64_t b, int upper) {
        const int64_t first = b * kBlockInputs;
        return tile.tiles(first / kByteTileInputs) + (1 - upper) * kTileBytes + r * kTileRowBytes
            + first % kByteTileInputs;
    };
    const RowLargest found =
        largest_of_row(row, num_in, num_blocks, [&](int64_t b, const Largest& largest) {
            __builtin_memcpy(bytes_at(b, 0), &largest, sizeof(largest));
        });
    const RowScale scale(found.of_all);
    tile.scales()[r] = scale.scale;
    IntLanes sums = {};
    quantise_blocks(row, num_in, num_blocks, scale, found.limit,
        [&](int64_t b) { return bytes_at(b, 0); },
        [&](int64_t b, int i, IntLanes p, const HalfFactors& factors, int at) {
            const IntLanes q = p * factors.multipliers[at];
            put_bytes(bytes_at(b, 1) + i, (q + 128) >> 8);
            put_bytes(bytes_at(b, 0) + i, q);  // as the upper one is the nearest
            sums += q;
            const int64_t end = b * kBlockInputs + i + kLanes;
            if (end % kUnscaledInputs == 0 || end == num_blocks * kBlockInputs) {
                tile.zero_sums((end - 1) / kUnscaledInputs)[r] = -zero * sum_of(sums);
                sums = IntLanes{};
            }
        });
    if (num_blocks * kBlockInputs % kByteTileInputs != 0) {
        __builtin_memset(bytes_at(num_blocks, 0), 0, kBlockInputs);
        __builtin_memset(bytes_at(num_blocks, 1), 0, kBlockInputs);
    }
}

void put_zeros(int r, const RowTile& tile) {
    for (int64_t k = 0; k < tile.num_tiles; ++k) {
        __builtin_memset(tile.tiles(k) + r * kTileRowBytes, 0, kTileRowBytes);
        __builtin_memset(tile.tiles(k) + kTileBytes + r * kTileRowBytes, 0, kTileRowBytes);
    }
    for (int64_t piece = 0; piece < tile.num_pieces; ++piece) tile.zero_sums(piece)[r] = 0;
    tile.scales()[r] = 0.0f;
}

void tile_rows(const Rows& rows, int64_t num_in, int64_t padded, int zero, void* target) {
    const int64_t num_blocks = padded / kBlockInputs;
    const RowTile tile(target, 0, num_blocks);
    for (int r = 0; r < kTileRows; ++r) {
        if (r < rows.count) {
            const auto* start = static_cast<const BFloat16*>(rows.start);
            tile_row(start + r * rows.stride, num_in, num_blocks, zero, r, tile);
        } else {
            put_zeros(r, tile);
        }
    }
}

}  // namespace

const IntegerTileKernels PDSERVE_OF_THIS_BUILD(IntegerTileKernels) = {
    .multiply = multiply_item,
    .tile_rows = tile_rows,
};

}  // namespace pdserve::linear
