// Products of integers (integers.h) through tiles, of many rows and codes of 4 bits by 32 inputs.
//
// Tiles of bfloat16 add up 32 inputs of it in float32. Both bytes of q are bfloat16, the upper one
// times 256, too, and so are codes. No sum of theirs has more than 24 bits (15 * 32 * 32768), so it
// is exact, and what tiles make of a group is what integers.h calls float(sum).
//
// 16 rows of x are [blocks] pairs of tiles. Of each 4 inputs, they have the even ones first, as codes
// are read. A chunk of panels becomes tiles, once for all rows.

#include "../../../isa/amx.h"
#include "../../../isa/build_name.h"
#include "../fetch.h"
#include "../finish.h"
#include "quantise.h"

namespace pdserve::linear {
namespace {

constexpr int kPanels = 2;  // together
constexpr int kStride = kPanels * kPanelOutputs;
constexpr int kTilesTogether = 4;  // of sums
constexpr int kTileFloats = kTileRows * kPanelOutputs;
constexpr int kMostCode = 16;

static_assert(int64_t{15} * kBlockInputs * 32768 < int64_t{1} << 24);

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where 16 rows of x are, and what follows their tiles: of each block the sums of q of the 16 rows;
// their scales.
struct RowTile {
    uint8_t* tiles(int64_t block) const { return start + block * 2 * kTileBytes; }
    float* sums(int64_t block) const {
        return reinterpret_cast<float*>(tiles(num_blocks)) + block * kTileRows;
    }
    float* scales() const { return sums(num_blocks); }

    uint8_t* start;
    int64_t num_blocks;
};

// Codes of a panel as tiles: 32 inputs each.
void widen_panel(const uint8_t* codes, int64_t num_blocks, int zero, uint8_t* target) {
    alignas(64) uint16_t numbers[2 * kMostCode];  // twice, so that a fifth bit of a code is ignored
    for (int i = 0; i < 2 * kMostCode; ++i) {
        const auto number = static_cast<float>(i % kMostCode - zero);
        numbers[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, number) >> 16);
    }
    for (int64_t i = 0; i < num_blocks * kHalfUnits; ++i) {
        const int64_t block = i / kHalfUnits, unit = i % kHalfUnits;
        const auto bytes = load_as<PairLanes>(codes + i * kUnitBytes);
        uint8_t* rows = target + block * kTileBytes + unit * 2 * kTileRowBytes;
#pragma GCC unroll 4
        for (int row = 0; row < 4; ++row) {
            // The lower halves of bytes, the even and the odd ones; then the upper halves.
            const PairLanes shifted = bytes >> (row / 2 * 4 + row % 2 * 8);
            uint8_t* to = rows + row / 2 * (kTileBytes / 2) + row % 2 * kTileRowBytes;
#if defined(__AVX512BW__)
            const __m512i table = _mm512_load_si512(numbers);
            store(to, _mm512_permutexvar_epi16((__m512i)shifted, table));
#else
            for (int lane = 0; lane < kLanes; ++lane) {
                const uint32_t pair = numbers[shifted[lane] & 15]
                    | static_cast<uint32_t>(numbers[shifted[lane] >> 16 & 15]) << 16;
                __builtin_memcpy(to + 4 * lane, &pair, sizeof(pair));
            }
#endif
        }
    }
}

class TileCodes {
public:
    TileCodes(const Call& call, const WorkItem& item, uint8_t* scratch)
        : call_(call),
          item_(item),
          num_blocks_(call.layout.num_units * call.layout.unit_inputs / kBlockInputs),
          tiles_of_panels_(scratch),
          numbers_(reinterpret_cast<float*>(scratch + kPanels * num_blocks_ * kTileBytes)),
          finish_(call) {}

    void run() {
        call_.coding.has_minimums ? run_all<true>() : run_all<false>();
    }

private:
    const uint8_t* panel_at(int64_t panel) const {
        return call_.weights + panel * call_.coded.panel_bytes;
    }
    // Of a panel of the chunk: [blocks][16], and as many minimums.
    float* scales_of(int p) const { return numbers_ + p * 2 * num_blocks_ * kPanelOutputs; }
    float* minimums_of(int p) const { return scales_of(p) + num_blocks_ * kPanelOutputs; }
    RowTile rows_at(int64_t row_tile) const {
        auto* x = static_cast<uint8_t*>(const_cast<void*>(call_.x));
        return {x + (item_.first_row / kTileRows + row_tile) * kTileRows * call_.x_row_bytes,
            num_blocks_};
    }

    template <bool kHasMinimums>
    void run_all() {
        const int64_t end = item_.first_panel + item_.num_panels;
        for (int64_t panel = item_.first_panel; panel < end; panel += kPanels) {
            const int64_t left = end - panel;
            multiply<kHasMinimums>(panel, left < kPanels ? static_cast<int>(left) : kPanels);
        }
    }

    void prepare(int64_t panel, int p) const {
        const uint8_t* start = panel_at(panel);
        const CodedLayout& layout = call_.coded;
        prefetch(start + layout.panel_bytes, static_cast<int>(layout.codes));
        widen_panel(start + layout.codes, num_blocks_, call_.coding.zero,
            tiles_of_panels_ + p * num_blocks_ * kTileBytes);
        for (int64_t group = 0; group < num_blocks_; ++group) {
            store(scales_of(p) + group * kPanelOutputs,
                numbers_at(call_.coding, layout, start, layout.scales, layout.super_scales, group)
                    .of[0]);
            if (!call_.coding.has_minimums) continue;
            store(minimums_of(p) + group * kPanelOutputs,
                numbers_at(
                    call_.coding, layout, start, layout.minimums, layout.super_minimums, group)
                    .of[0]);
        }
    }

    template <bool kHasMinimums>
    void multiply(int64_t panel, int count) {
        for (int p = 0; p < count; ++p) prepare(panel + p, p);
        const int64_t row_tiles = ceil_div(item_.num_rows, kTileRows);
        const int64_t chunk_bytes = count * call_.coded.panel_bytes;
        Fetch fetch(panel_at(panel) + chunk_bytes, chunk_bytes);
        alignas(64) float sums[kMostTileRows * kStride];
        alignas(64) float products[2][kTilesTogether * kTileFloats];
        Pending before{};
        int turn = 0;
        for (int64_t first = 0; first < num_blocks_; first += kTilesTogether) {
            for (int64_t i = 0; i < row_tiles; ++i) {
                for (int p = 0; p < count; ++p, turn ^= 1) {
                    float* target = sums + i * kTileRows * kStride + p * kPanelOutputs;
                    const Pending now{rows_at(i), first, p, products[turn], target};
                    compute(now, fetch);
                    if (before.sums != nullptr) add<kHasMinimums>(before);
                    before = now;
                }
            }
        }
        add<kHasMinimums>(before);
        finish_.run(sums, kStride, item_.first_row, item_.num_rows, panel, count);
    }

    // Products of 16 rows and a panel, of some blocks: tiles of sums, to be added to all. What tiles
    // store cannot be read at once, so this is done while the next ones are computed.
    struct Pending {
        RowTile x;
        int64_t first;  // block
        int p;
        float* products;
        float* sums;
    };

    int64_t count_from(int64_t first) const {
        return num_blocks_ - first < kTilesTogether ? num_blocks_ - first : kTilesTogether;
    }

    void compute(const Pending& now, Fetch& fetch) {
        const uint8_t* codes = tiles_of_panels_ + (now.p * num_blocks_ + now.first) * kTileBytes;
        const uint8_t* x = now.x.tiles(now.first);
        const int64_t count = count_from(now.first);
        unrolled<kTilesTogether>([&](auto i) {
            if (i >= count) return;
            constexpr int kCodes = kTilesTogether + i % 2 * 2, kX = kCodes + 1;
            fetch.take_turn();
            tiles_.zero<i>();
            tiles_.load<kCodes>(codes + i * kTileBytes, kTileRowBytes);
            tiles_.load<kX>(x + 2 * i * kTileBytes, kTileRowBytes);
            tiles_.multiply_bfloat16<i, kX, kCodes>();
            tiles_.load<kX>(x + (2 * i + 1) * kTileBytes, kTileRowBytes);
            tiles_.multiply_bfloat16<i, kX, kCodes>();
        });
        unrolled<kTilesTogether>([&](auto i) {
            if (i < count) tiles_.store<i>(now.products + i * kTileFloats, kTileRowBytes);
        });
    }

    template <bool kHasMinimums>
    PDSERVE_INLINE void add(const Pending& before) const {
        const RowTile& x = before.x;
        FloatLanes totals[kTileRows];
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
            totals[r] = before.first == 0 ? splat(0.0f) : load(before.sums + r * kStride);
        }
        const int64_t end = before.first + count_from(before.first);
        const float* product = before.products;
        for (int64_t b = before.first; b < end; ++b, product += kTileFloats) {
            const FloatLanes scale = load(scales_of(before.p) + b * kPanelOutputs);
            [[maybe_unused]] FloatLanes minimum{};
            if constexpr (kHasMinimums) minimum = load(minimums_of(before.p) + b * kPanelOutputs);
#pragma GCC unroll 16
            for (int r = 0; r < kTileRows; ++r) {
                if constexpr (kHasMinimums) {
                    totals[r] = totals[r] - minimum * splat(x.sums(b)[r]);
                }
                totals[r] = totals[r] + load(product + r * kPanelOutputs) * scale;
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
            if (end == num_blocks_) totals[r] = totals[r] * splat(x.scales()[r]);
            store(before.sums + r * kStride, totals[r]);
        }
    }

    const Call& call_;
    const WorkItem& item_;
    const int64_t num_blocks_;
    uint8_t* const tiles_of_panels_;
    float* const numbers_;
    const Finish finish_;
    Tiles tiles_;
};

void multiply_item(const Call& call, const WorkItem& item, uint8_t* scratch) {
    TileCodes(call, item, scratch).run();
}

// Of each 4 lanes the even ones first, as bfloat16, which they are.
PDSERVE_INLINE void put_numbers(uint8_t* target, IntLanes integers) {
    const auto bits = (PairLanes)__builtin_convertvector(integers, FloatLanes);
#if defined(__AVX512F__)
    const __m512i ordered = _mm512_shuffle_epi32((__m512i)bits, _MM_PERM_DBCA);
    store(target, _mm512_cvtepi32_epi16(_mm512_srli_epi32(ordered, 16)));
#else
    for (int i = 0; i < kLanes; ++i) {
        const int from = i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
        const auto half = static_cast<uint16_t>(bits[from] >> 16);
        __builtin_memcpy(target + 2 * i, &half, sizeof(half));
    }
#endif
}

void tile_row(const BFloat16* row, int64_t num_in, int r, const RowTile& tile) {
    const auto row_of = [&](int64_t b) { return tile.tiles(b) + r * kTileRowBytes; };
    // Until they are rounded, the numbers of blocks are where the inputs will be.
    const RowLargest found =
        largest_of_row(row, num_in, tile.num_blocks, [&](int64_t b, const Largest& largest) {
            __builtin_memcpy(row_of(b), &largest, sizeof(largest));
        });
    const RowScale scale(found.of_all);
    tile.scales()[r] = scale.scale;
    IntLanes sums = {};
    quantise_blocks(row, num_in, tile.num_blocks, scale, found.limit, row_of,
        [&](int64_t b, int i, IntLanes p, const HalfFactors& factors, int at) {
            const IntLanes q = p * factors.multipliers[at];
            const IntLanes upper = (q + 128) >> 8 << 8;
            put_numbers(row_of(b) + 2 * i, upper);
            put_numbers(row_of(b) + kTileBytes + 2 * i, q - upper);
            sums = i == 0 ? q : sums + q;
            if (i + kLanes < kBlockInputs) return;
            tile.sums(b)[r] = static_cast<float>(sum_of(sums));
        });
}

void put_zeros(int r, const RowTile& tile) {
    for (int64_t b = 0; b < tile.num_blocks; ++b) {
        __builtin_memset(tile.tiles(b) + r * kTileRowBytes, 0, kTileRowBytes);
        __builtin_memset(tile.tiles(b) + kTileBytes + r * kTileRowBytes, 0, kTileRowBytes);
        tile.sums(b)[r] = 0.0f;
    }
    tile.scales()[r] = 0.0f;
}

void tile_rows(const Rows& rows, int64_t num_in, int64_t padded, int, void* target) {
    const RowTile tile{static_cast<uint8_t*>(target), padded / kBlockInputs};
    for (int r = 0; r < kTileRows; ++r) {
        if (r < rows.count) {
            tile_row(static_cast<const BFloat16*>(rows.start) + r * rows.stride, num_in, r, tile);
        } else {
            put_zeros(r, tile);
        }
    }
}

// Sums of blocks, and the scale, behind two tiles of a block.
int64_t row_bytes(int64_t num_inputs) {
    return num_inputs * 4 + (num_inputs / kBlockInputs + 1) * static_cast<int64_t>(sizeof(float));
}

// Two panels as tiles, and their numbers.
int64_t scratch_bytes(int64_t num_inputs) {
    return kPanels * (num_inputs * 2 * kPanelOutputs + num_inputs / kBlockInputs * 2 * kUnitBytes);
}

}  // namespace

const IntegerTileKernels PDSERVE_OF_THIS_BUILD(CodeTileKernels) = {
    .multiply = multiply_item,
    .tile_rows = tile_rows,
    .row_bytes = row_bytes,
    .scratch_bytes = scratch_bytes,
    .fewest_rows = kTileRows + 1,
};

}  // namespace pdserve::linear
