// Products of integers (integers.h) through tiles, of many rows and int8 or nested codes.
//
// 16 rows of x are [inputs / 64] pairs of tiles: q = 256 * upper + lower, which are signed. 64
// inputs of a panel of int8 are a tile already; nested codes become such, once for all rows. Their
// products' sums are of 32 bits and never too large over a piece, whose inputs share a scale, and
// during which two panels and two pairs of sums are in registers. With more rows than one tile has,
// all of them use a piece of the panels while it is in the L1 cache.

#include "../../../isa/amx.h"
#include "../../../isa/build_name.h"
#include "../fetch.h"
#include "../finish.h"
#include "../read_codes.h"
#include "quantise.h"

namespace pdserve::linear {
namespace {

constexpr int kPanels = 2;  // together
constexpr int kStride = kPanels * kPanelOutputs;
constexpr int kUnitsInTile = kTileBytes / kUnitBytes;
constexpr int kByteTileInputs = 64;  // of a tile of bytes
constexpr int64_t kStreamAhead = 2048;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The panels of int8.
class Bytes {
public:
    static constexpr int kPieceInputs = kUnscaledInputs;
    static constexpr bool kHasScales = false;  // `Finish` has them

    Bytes(const Call& call, uint8_t* scratch)
        : call_(call), num_units_(call.layout.num_units), last_tiles_(scratch) {}

    static int64_t scratch_bytes(int64_t) { return kPanels * kTileBytes; }

    const uint8_t* panel_at(int64_t panel) const {
        return call_.weights + panel * call_.layout.panel_bytes;
    }

    void prepare(int64_t panel, int count) {
        first_ = panel_at(panel);
        const int64_t units_left = num_units_ % kUnitsInTile;
        for (int p = 0; p < count && units_left > 0; ++p) {
            // What is multiplied by zeros may be anything, but must be readable.
            __builtin_memcpy(last_tiles_ + p * kTileBytes,
                panel_at(panel + p) + (num_units_ - units_left) * kUnitBytes,
                units_left * kUnitBytes);
        }
    }

    PDSERVE_INLINE const uint8_t* tile_at(int p, int64_t k) const {
        return k < num_units_ / kUnitsInTile ? first_ + p * call_.layout.panel_bytes + k * kTileBytes
                                             : last_tiles_ + p * kTileBytes;
    }
    PDSERVE_INLINE void fetch_ahead(int p, int64_t k) const {
        prefetch(tile_at(p, k) + kStreamAhead, kTileBytes);
    }
    PDSERVE_INLINE FloatLanes scales(int, int64_t) const { return splat(1.0f); }

private:
    const Call& call_;
    const int64_t num_units_;
    uint8_t* const last_tiles_;
    const uint8_t* first_ = nullptr;  // of the panels that are multiplied
};

// Those of nested codes: at scratch, tiles of two panels and their scales.
class NestedCodes {
public:
    static constexpr int kPieceInputs = kSuperInputs;
    static constexpr bool kHasScales = true;

    NestedCodes(const Call& call, uint8_t* scratch)
        : call_(call),
          num_blocks_(call.layout.num_units / kBlockUnits),
          tile_bytes_(bytes_of_tiles(num_blocks_ * kBlockInputs)),
          tiles_(scratch),
          scales_(reinterpret_cast<float*>(scratch + kPanels * tile_bytes_)) {}

    static int64_t scratch_bytes(int64_t num_inputs) {
        return kPanels
            * (bytes_of_tiles(num_inputs) + ceil_div(num_inputs, kSuperInputs) * kUnitBytes);
    }

    const uint8_t* panel_at(int64_t panel) const {
        return call_.weights + panel * call_.coded.panel_bytes;
    }

    void prepare(int64_t panel, int count) {
        for (int p = 0; p < count; ++p) {
            const uint8_t* start = panel_at(panel + p);
            put_super_scales(call_.coded, start, scales_of(p));
            widen_nested(call_.coded, start, num_blocks_, tiles_ + p * tile_bytes_);
        }
    }

    PDSERVE_INLINE const uint8_t* tile_at(int p, int64_t k) const {
        return tiles_ + p * tile_bytes_ + k * kTileBytes;
    }
    PDSERVE_INLINE void fetch_ahead(int, int64_t) const {}
    PDSERVE_INLINE FloatLanes scales(int p, int64_t piece) const {
        return load(scales_of(p) + piece * kPanelOutputs);
    }

private:
    static int64_t bytes_of_tiles(int64_t num_inputs) {
        return ceil_div(num_inputs, kByteTileInputs) * kTileBytes;
    }
    float* scales_of(int p) const { return scales_ + p * call_.coded.num_supers * kPanelOutputs; }

    const Call& call_;
    const int64_t num_blocks_;
    const int64_t tile_bytes_;  // of a panel
    uint8_t* const tiles_;
    float* const scales_;
};

// Where 16 rows of x are, and what follows their tiles: of each piece -zero times the sums of q of
// the 16 rows; their scales.
template <int kPieceInputs>
struct RowTile {
    static constexpr int kTilesInPiece = kPieceInputs / kByteTileInputs;

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

    static int64_t row_bytes(int64_t num_inputs) {
        const int64_t tiles = ceil_div(num_inputs, kByteTileInputs);
        return tiles * 2 * kByteTileInputs + (ceil_div(tiles, kTilesInPiece) + 1) * 4;
    }

    int64_t num_tiles;
    int64_t num_pieces;
    uint8_t* start;
    int64_t bytes;  // of 16 rows
};

template <class Panels>
class TileIntegers {
public:
    using Rows16 = RowTile<Panels::kPieceInputs>;

    TileIntegers(const Call& call, const WorkItem& item, uint8_t* scratch)
        : item_(item),
          x_(Rows16(call.x, call.x_row_bytes, call.layout.num_units / kBlockUnits)
                  .at(item.first_row / kTileRows)),
          panels_(call, scratch),
          finish_(call) {}

    void run() {
        const int64_t end = item_.first_panel + item_.num_panels;
        for (int64_t panel = item_.first_panel; panel < end; panel += kPanels) {
            end - panel >= kPanels ? multiply<kPanels>(panel) : multiply<1>(panel);
        }
    }

private:
    template <int kCount>
    void multiply(int64_t panel) {
        panels_.prepare(panel, kCount);
        const int64_t row_tiles = ceil_div(item_.num_rows, kTileRows);
        const uint8_t* next = panels_.panel_at(panel + kCount);
        const int64_t chunk_bytes = next - panels_.panel_at(panel);
        Fetch fetch(next, row_tiles == 1 ? 0 : chunk_bytes);
        alignas(64) float sums[kMostTileRows * kStride];
        Products products[2];
        Pending before{0, x_, nullptr, nullptr};
        int turn = 0;
        for (int64_t piece = 0; piece < x_.num_pieces; ++piece) {
            for (int64_t i = 0; i < row_tiles; ++i, turn ^= 1) {
                const Pending now{piece, x_.at(i), &products[turn], sums + i * kTileRows * kStride};
                compute<kCount>(now, fetch, i == 0);
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
        Rows16 x;
        Products* products;
        float* sums;
    };

    template <int kCount>
    PDSERVE_INLINE void compute(const Pending& now, Fetch& fetch, bool is_first_pass) {
        constexpr int kX = 2 * kPanels, kWeights = kX + 2;  // the first registers of each
        const Rows16& x = now.x;
        unrolled<2 * kCount>([&](auto i) { tiles_.template zero<i>(); });
        const int64_t first = now.piece * Rows16::kTilesInPiece;
        const int64_t left = x.num_tiles - first;
        const int64_t end = first + (left < Rows16::kTilesInPiece ? left : Rows16::kTilesInPiece);
        for (int64_t k = first; k < end; ++k) {
            fetch.take_turn();
            tiles_.template load<kX>(x.tiles(k), kTileRowBytes);
            tiles_.template load<kX + 1>(x.tiles(k) + kTileBytes, kTileRowBytes);
            unrolled<kCount>([&](auto p) {
                if (is_first_pass) panels_.fetch_ahead(p, k);
                tiles_.template load<kWeights + p>(panels_.tile_at(p, k), kTileRowBytes);
                tiles_.template multiply_bytes<2 * p, kX, kWeights + p>();
                tiles_.template multiply_bytes<2 * p + 1, kX + 1, kWeights + p>();
            });
        }
        unrolled<2 * kCount>(
            [&](auto i) { tiles_.template store<i>(now.products->of[i], kTileRowBytes); });
    }

    template <int kCount>
    PDSERVE_INLINE void add(const Pending& before) const {
        const Rows16& x = before.x;
        const int64_t piece = before.piece;
        FloatLanes scales[kCount];
#pragma GCC unroll 2
        for (int p = 0; p < kCount; ++p) scales[p] = panels_.scales(p, piece);
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
                if constexpr (Panels::kHasScales) y = y * scales[p];
                float* target = sums + p * kPanelOutputs;
                y = (piece > 0 ? load(target) : splat(0.0f)) + y;
                if (is_last) y = y * splat(x.scales()[r]);
                store(target, y);
            }
        }
    }

    const WorkItem& item_;
    const Rows16 x_;
    Panels panels_;
    const Finish finish_;
    Tiles tiles_;
};

template <class Panels>
void multiply_item(const Call& call, const WorkItem& item, uint8_t* scratch) {
    TileIntegers<Panels>(call, item, scratch).run();
}

PDSERVE_INLINE void put_bytes(uint8_t* target, IntLanes lanes) {
#if defined(__AVX512F__)
    store(target, _mm512_cvtepi32_epi8((__m512i)lanes));
#else
    for (int i = 0; i < kLanes; ++i) target[i] = static_cast<uint8_t>(lanes[i]);
#endif
}

template <int kPieceInputs>
void tile_row(const BFloat16* row, int64_t num_in, int64_t num_blocks, int zero, int r,
    const RowTile<kPieceInputs>& tile) {
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
            if (end % kPieceInputs == 0 || end == num_blocks * kBlockInputs) {
                tile.zero_sums((end - 1) / kPieceInputs)[r] = -zero * sum_of(sums);
                sums = IntLanes{};
            }
        });
    if (num_blocks * kBlockInputs % kByteTileInputs != 0) {
        __builtin_memset(bytes_at(num_blocks, 0), 0, kBlockInputs);
        __builtin_memset(bytes_at(num_blocks, 1), 0, kBlockInputs);
    }
}

template <int kPieceInputs>
void put_zeros(int r, const RowTile<kPieceInputs>& tile) {
    for (int64_t k = 0; k < tile.num_tiles; ++k) {
        __builtin_memset(tile.tiles(k) + r * kTileRowBytes, 0, kTileRowBytes);
        __builtin_memset(tile.tiles(k) + kTileBytes + r * kTileRowBytes, 0, kTileRowBytes);
    }
    for (int64_t piece = 0; piece < tile.num_pieces; ++piece) tile.zero_sums(piece)[r] = 0;
    tile.scales()[r] = 0.0f;
}

template <int kPieceInputs>
void tile_rows(const Rows& rows, int64_t num_in, int64_t padded, int zero, void* target) {
    const int64_t num_blocks = padded / kBlockInputs;
    const RowTile<kPieceInputs> tile(target, 0, num_blocks);
    for (int r = 0; r < kTileRows; ++r) {
        if (r < rows.count) {
            const auto* start = static_cast<const BFloat16*>(rows.start);
            tile_row(start + r * rows.stride, num_in, num_blocks, zero, r, tile);
        } else {
            put_zeros(r, tile);
        }
    }
}

// Up to 4 rows, vectors are as fast.
template <class Panels>
constexpr IntegerTileKernels kKernels = {
    .multiply = multiply_item<Panels>,
    .tile_rows = tile_rows<Panels::kPieceInputs>,
    .row_bytes = RowTile<Panels::kPieceInputs>::row_bytes,
    .scratch_bytes = Panels::scratch_bytes,
    .fewest_rows = 5,
};

}  // namespace

const IntegerTileKernels PDSERVE_OF_THIS_BUILD(IntegerTileKernels) = kKernels<Bytes>;
const IntegerTileKernels PDSERVE_OF_THIS_BUILD(NestedTileKernels) = kKernels<NestedCodes>;

}  // namespace pdserve::linear
