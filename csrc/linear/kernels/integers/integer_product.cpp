// Products of integers (integers.h), once for each instruction set, without fused operations.
//
// With few rows a panel at a time, as it comes from memory: its scales are brought to float32, then
// its codes are read as they are. With more rows than one tile has, a chunk of panels, whose codes
// become bytes, once for all rows.

#include "../../../isa/build_name.h"
#include "../finish.h"
#include "integer_tile.h"
#include "quantise.h"

namespace pdserve::linear {
namespace {

constexpr int kSumStride = kMaxChunkPanels * kPanelOutputs;

// Up to this many rows, memory bandwidth is the limit.
constexpr int kMostStreamedRows = 2;

// With more, codes become bytes once for all.
constexpr int kMostInlinePasses = 4;

// Of a chunk's codes as bytes: what the L1 cache holds beside a few rows of x.
constexpr int64_t kMostWideBytes = 32 << 10;

template <int kBits>
void widen_blocks(const uint8_t* block, int64_t num_blocks, int block_bytes, uint8_t* target) {
    for (int64_t b = 0; b < num_blocks; ++b, block += block_bytes) {
#pragma GCC unroll 8
        for (int u = 0; u < kBlockUnits; ++u) {
#pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; ++v) {
                store(target + v * kLanes * 4, unit_at<kBits>(block, u, v));
            }
            target += kUnitBytes;
        }
    }
}

void widen_codes(int bits, const uint8_t* codes, int64_t num_blocks, int block_bytes,
    uint8_t* target) {
    switch (bits) {
        case 4: return widen_blocks<4>(codes, num_blocks, block_bytes, target);
        case 5: return widen_blocks<5>(codes, num_blocks, block_bytes, target);
        default: return widen_blocks<6>(codes, num_blocks, block_bytes, target);
    }
}

class MultiplyIntegers {
public:
    MultiplyIntegers(const Call& call, const WorkItem& item, uint8_t* scratch)
        : call_(call),
          coding_(call.coding),
          coded_(call.coded),
          item_(item),
          num_blocks_(call.layout.num_units * call.layout.unit_inputs / kBlockInputs),
          num_scales_(coding_.is_nested() ? coded_.num_supers : coded_.padded_groups()),
          group_bytes_(num_scales_ * kPanelOutputs * static_cast<int64_t>(sizeof(float))),
          is_wide_(item.num_rows > kMostInlinePasses * kMostIntegerRows && coding_.bits != 8),
          scaling_(scaling()),
          scratch_(scratch),
          finish_(call) {}

    void run() {
        const int64_t end = item_.first_panel + item_.num_panels;
        const int64_t wide_bytes = num_blocks_ * 8 * kUnitBytes;
        const int64_t most = 4 * wide_bytes <= kMostWideBytes || item_.num_rows <= kMostIntegerRows
            ? kMaxChunkPanels
            : 2;
        for (int64_t panel = item_.first_panel; panel < end; panel += most) {
            const int64_t left = end - panel;
            multiply_chunk(panel, static_cast<int>(left < most ? left : most));
        }
    }

private:
    int64_t wide_bytes() const { return is_wide_ ? num_blocks_ * 8 * kUnitBytes : 0; }
    int64_t prepared_bytes() const { return wide_bytes() + 2 * group_bytes_; }

    const uint8_t* panel_at(int64_t panel) const {
        return call_.weights + panel * coded_.panel_bytes;
    }

    // At scratch: codes as bytes, if they are so; scales; minimums.
    void prepare(const uint8_t* panel, uint8_t* target) const {
        if (is_wide_ && coding_.is_nested()) {
            widen_nested(coded_, panel, num_blocks_, target);
        } else if (is_wide_) {
            widen_codes(
                coding_.bits, panel + coded_.codes, num_blocks_, coded_.block_bytes, target);
        }
        auto* scales = reinterpret_cast<float*>(target + wide_bytes());
        if (coding_.is_nested()) return put_super_scales(coded_, panel, scales);
        put_numbers(panel, coded_.scales, coded_.super_scales, scales);
        if (!coding_.has_minimums) return;
        put_numbers(panel, coded_.minimums, coded_.super_minimums,
            scales + num_scales_ * kPanelOutputs);
    }

    void put_numbers(
        const uint8_t* panel, int64_t numbers, int64_t supers, float* target) const {
        for (int64_t group = 0; group < coded_.num_groups; ++group) {
            const PanelNumbers found =
                numbers_at(coding_, coded_, panel, numbers, supers, group);
#pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; ++v) {
                store(target + group * kPanelOutputs + v * kLanes, found.of[v]);
            }
        }
        const int64_t end = coded_.num_groups * kPanelOutputs;
        for (int64_t i = end; i < num_scales_ * kPanelOutputs; ++i) target[i] = 0.0f;
    }

    Scaling scaling() const {
        if (coded_.num_groups == 0) return Scaling::kNone;
        if (coding_.is_nested()) return is_wide_ ? Scaling::kBlock : Scaling::kNested;
        if (coding_.group < kBlockInputs) {
            return coding_.has_minimums ? Scaling::kHalvesAndMinimums : Scaling::kHalves;
        }
        return coding_.has_minimums ? Scaling::kBlockAndMinimum : Scaling::kBlock;
    }

    // Of panels from p of a chunk on, and of rows from this one on.
    IntegerTile tile_of(int64_t first_panel, int p, int64_t row, float* sums) const {
        const uint8_t* prepared = prepared_at(p);
        IntegerTile tile{};
        tile.x = static_cast<const uint8_t*>(call_.x) + row * call_.x_row_bytes;
        tile.x_row_bytes = call_.x_row_bytes;
        tile.codes = is_wide_ ? prepared : panel_at(first_panel + p) + coded_.codes;
        tile.codes_step = is_wide_ ? prepared_bytes() : coded_.panel_bytes;
        tile.num_blocks = num_blocks_;
        tile.scales = reinterpret_cast<const float*>(prepared + wide_bytes());
        tile.minimums = tile.scales + num_scales_ * kPanelOutputs;
        tile.numbers_step = prepared_bytes() / static_cast<int64_t>(sizeof(float));
        tile.nested_scales = panel_at(first_panel + p) + coded_.scales;
        tile.nested_minimums = panel_at(first_panel + p) + coded_.minimums;
        const int group = scaling_ == Scaling::kNone ? kUnscaledInputs
            : coding_.is_nested()                    ? kSuperInputs
                                                     : coding_.group;
        tile.blocks_shift = 0;
        while (kBlockInputs << tile.blocks_shift < group) ++tile.blocks_shift;
        tile.sums = sums + p * kPanelOutputs;
        tile.sum_stride = kSumStride;
        return tile;
    }

    void multiply_chunk(int64_t first_panel, int num_panels) const {
        item_.num_rows <= kMostIntegerRows ? multiply_few(first_panel, num_panels)
                                     : multiply_many(first_panel, num_panels);
    }

    uint8_t* prepared_at(int p) const { return scratch_ + p * prepared_bytes(); }

    // Calls body(p, count) for the panels that are computed together.
    template <class Body>
    static void for_tiles(int num_panels, int most, const Body& body) {
        for (int p = 0, count = 0; p < num_panels; p += count) {
            count = num_panels - p < most ? 1 : most;
            body(p, count);
        }
    }

    // Panels from their first bytes to their last: memory is slower out of order. With very few
    // rows, it is what is waited for, and fastest one panel at a time.
    void multiply_few(int64_t first_panel, int num_panels) const {
        const auto num_rows = static_cast<int>(item_.num_rows);
        alignas(64) float sums[kMostIntegerRows * kSumStride];
        const int most = num_rows <= kMostStreamedRows ? 1 : kMostIntegerPanels;
        for_tiles(num_panels, most, [&](int first, int count) {
            for (int p = first; p < first + count; ++p) {
                const uint8_t* panel = panel_at(first_panel + p);
                prefetch(panel + codes_ahead(coding_.bits), static_cast<int>(coded_.codes));
                prepare(panel, prepared_at(p));
            }
            IntegerTile tile = tile_of(first_panel, first, item_.first_row, sums);
            tile.is_ahead = true;
            pick_integer_tile(scaling_, coding_.bits, num_rows, count)(tile);
        });
        finish_.run(sums, kSumStride, item_.first_row, num_rows, first_panel, num_panels);
    }

    void multiply_many(int64_t first_panel, int num_panels) const {
        for (int p = 0; p < num_panels; ++p) prepare(panel_at(first_panel + p), prepared_at(p));
        const int64_t num_pieces = (item_.num_rows + kMostIntegerRows - 1) / kMostIntegerRows;
        alignas(64) float sums[kMostIntegerRows * kSumStride];
        for (int64_t i = 0; i < num_pieces; ++i) {
            // Pieces of nearly equal size, larger ones first.
            const auto start = [&](int64_t piece) {
                return (item_.num_rows * piece + num_pieces - 1) / num_pieces;
            };
            const int64_t row = item_.first_row + start(i);
            const int num_rows = static_cast<int>(start(i + 1) - start(i));
            for_tiles(num_panels, kMostIntegerPanels, [&](int p, int count) {
                IntegerTile tile = tile_of(first_panel, p, row, sums);
                if (i == 0) {
                    // Of the next chunk.
                    tile.next = panel_at(first_panel + p + num_panels);
                    tile.next_bytes = (count * coded_.panel_bytes + num_blocks_ - 1) / num_blocks_;
                }
                pick_integer_tile(scaling_, is_wide_ ? 8 : coding_.bits, num_rows, count)(tile);
            });
            finish_.run(sums, kSumStride, row, num_rows, first_panel, num_panels);
        }
    }

    const Call& call_;
    const Coding& coding_;
    const CodedLayout& coded_;
    const WorkItem& item_;
    const int64_t num_blocks_;
    const int64_t num_scales_;   // of an output, that sums are multiplied by
    const int64_t group_bytes_;  // of a panel's as float32
    const bool is_wide_;
    const Scaling scaling_;
    uint8_t* const scratch_;
    const Finish finish_;
};

// As dot.h keeps it.
void quantise_row(
    const BFloat16* row, int64_t num_in, int64_t num_blocks, int zero, uint8_t* target) {
    const auto numbers_at = [&](int64_t b) { return target + b * kLowerBlockBytes + kLowerBytes; };
    const RowLargest found =
        largest_of_row(row, num_in, num_blocks, [&](int64_t b, const Largest& largest) {
            __builtin_memcpy(numbers_at(b), &largest, sizeof(largest));
        });
    const RowScale scale(found.of_all);
    __builtin_memcpy(target + num_blocks * kRowBlockBytes, &scale.scale, sizeof(float));
    uint8_t* const uppers = target + num_blocks * kLowerBlockBytes;
    BlockNumbers numbers;
    IntLanes sums = {};
    quantise_blocks(row, num_in, num_blocks, scale, found.limit, numbers_at,
        [&](int64_t b, int i, IntLanes p, const HalfFactors& factors, int at) {
            const int half = i / kHalfBlock;
            const int32_t multiplier = factors.multipliers[at];
            put_integers(target + b * kLowerBlockBytes, uppers + b * kUpperBytes, i,
                kKeepsP ? p : p * multiplier);
            sums = i % kHalfBlock == 0 ? p : sums + p;
            if ((i + kLanes) % kHalfBlock != 0) return;
            const int32_t sum = sum_of(sums);
            numbers.multipliers[half] = multiplier;
            numbers.zero_sums[half] = (kLessCodes - zero) * (kKeepsP ? sum : sum * multiplier);
            numbers.sums[half] = static_cast<float>(sum * multiplier);
            if (half == 0) return;
            numbers.sum = numbers.sums[0] + numbers.sums[1];
            numbers.is_wide = factors.is_wide[at / 2];
            __builtin_memcpy(numbers_at(b), &numbers, sizeof(numbers));
        });
}

void quantise_rows(const Rows& rows, int64_t num_in, int64_t padded, int zero, void* target) {
    const int64_t num_blocks = padded / kBlockInputs;
    for (int64_t r = 0; r < rows.count; ++r) {
        quantise_row(static_cast<const BFloat16*>(rows.start) + r * rows.stride, num_in, num_blocks,
            zero,
            static_cast<uint8_t*>(target) + r * (num_blocks * kRowBlockBytes + kRowEndBytes));
    }
}

void multiply_item(const Call& call, const WorkItem& item, uint8_t* scratch) {
    MultiplyIntegers(call, item, scratch).run();
}

}  // namespace

const IntegerKernels PDSERVE_OF_THIS_BUILD(IntegerKernels) = {
    .multiply = multiply_item,
    .quantise = quantise_rows,
};

}  // namespace pdserve::linear
