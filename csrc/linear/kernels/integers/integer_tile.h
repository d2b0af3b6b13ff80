// The product of a few rows of integers and one or two panels of codes, with the sums in registers.
//
// Of two panels, an input of x is read once for both, so that multiplications, not reads, are what a
// processor is busy with.
#pragma once

#include <utility>

#include "../read_codes.h"
#include "dot.h"

namespace pdserve::linear {
namespace {

// What is done with the sums of a block; integers.h.
enum class Scaling {
    kNone,  // at the end, by others
    kBlock,
    kBlockAndMinimum,
    kHalves,
    kHalvesAndMinimums,
    kNested,  // as kBlock, of bytes that are made of codes
};

constexpr bool has_halves(Scaling scaling) {
    return scaling == Scaling::kHalves || scaling == Scaling::kHalvesAndMinimums;
}

// Computed together, as registers hold them: totals, sums of groups, and of half a block.
constexpr int kMostIntegerPanels = kLanes == 16 ? 2 : 1;
constexpr int kMostIntegerRows = kLanes == 16 ? 4 : kLanes / 2;

struct IntegerTile {
    const uint8_t* x;
    int64_t x_row_bytes;
    const uint8_t* codes;
    int64_t codes_step;  // bytes to the next panel's
    int64_t num_blocks;
    const float* scales;    // [groups][16]
    const float* minimums;  // likewise
    int64_t numbers_step;   // floats to the next panel's
    const uint8_t* nested_scales;    // of nested codes, with the panels' codes
    const uint8_t* nested_minimums;
    int blocks_shift;       // a group has 2**this blocks
    const uint8_t* next;    // to be fetched: so many bytes a block
    int64_t next_bytes;
    bool is_ahead;  // so are the codes, before their use
    float* sums;    // [rows][sum_stride]
    int64_t sum_stride;
};

// How far ahead codes are fetched, in bytes, as measured.
constexpr int64_t codes_ahead(int bits) { return bits == 8 ? 4096 : 8192; }

// Adds a block to the sums of a group and, where this ends, those to the totals: of vector v of each
// panel.
template <Scaling kScaling, int kBits, int kRows, int kPanels>
class AddBlock {
public:
    using Sums = IntLanes[kRows][kPanels];
    using Totals = FloatLanes[kRows][kPanels];

    PDSERVE_INLINE AddBlock(
        const IntegerTile& tile, int64_t b, int v, const uint8_t* block)
        : tile_(tile), v_(v), block_(block),
          x_(tile.x + b * kLowerBlockBytes),
          upper_(tile.x + tile.num_blocks * kLowerBlockBytes + b * kUpperBytes),
          group_(has_halves(kScaling) ? 2 * b : b >> tile.blocks_shift) {
        if constexpr (kScaling == Scaling::kNested) {
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                const int64_t at = p * tile.codes_step + b * kPanelOutputs;
                nesting_[p] = Nesting(tile.nested_scales + at, tile.nested_minimums + at, v);
            }
        }
    }

    PDSERVE_INLINE void run(Sums& sums, Totals& totals, bool ends_group) const {
        if constexpr (has_halves(kScaling)) {
            add_up<0>(sums);
            end_group<0>(sums, totals);
            add_up<1>(sums);
            end_group<1>(sums, totals);
        } else {
            add_up<0>(sums);
            add_up<1>(sums);
            if constexpr (kScaling == Scaling::kBlockAndMinimum) {
                each([&](int r, int p) {
                    totals[r][p] = totals[r][p]
                        - of_weights(tile_.minimums, 0, p) * of_x(r, offsetof(BlockNumbers, sum));
                });
            }
            if (ends_group) end_group<0>(sums, totals);
        }
    }

private:
    template <class Body>
    PDSERVE_INLINE static void each(const Body& body) {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) body(r, p);
        }
    }

    PDSERVE_INLINE const uint8_t* row(int r) const { return x_ + r * tile_.x_row_bytes; }

    template <class T>
    PDSERVE_INLINE auto number(int r, size_t offset) const {
        return number_at<T>(row(r), offset);
    }

    // A row's number, in all lanes.
    PDSERVE_INLINE FloatLanes of_x(int r, size_t offset) const {
        return splat(number<float>(r, offset));
    }

    // Those of a group, of each panel.
    PDSERVE_INLINE FloatLanes of_weights(const float* numbers, int half, int p) const {
        return load(numbers + p * tile_.numbers_step + (group_ + half) * kPanelOutputs + v_ * kLanes);
    }

    template <int kHalf>
    PDSERVE_INLINE void end_group(Sums& sums, Totals& totals) const {
        each([&](int r, int p) {
            if constexpr (kScaling == Scaling::kHalvesAndMinimums) {
                constexpr size_t kSum = offsetof(BlockNumbers, sums) + kHalf * sizeof(float);
                totals[r][p] = totals[r][p] - of_weights(tile_.minimums, kHalf, p) * of_x(r, kSum);
            }
            FloatLanes y = __builtin_convertvector(sums[r][p], FloatLanes);
            if constexpr (kScaling != Scaling::kNone) y = y * of_weights(tile_.scales, kHalf, p);
            totals[r][p] = totals[r][p] + y;
            sums[r][p] = IntLanes{};
        });
    }

    // Adds codes less zero, times q, of half a block.
    template <int kHalf>
    PDSERVE_INLINE void add_up(Sums& totals) const {
        constexpr size_t kZeroSum = offsetof(BlockNumbers, zero_sums) + kHalf * sizeof(int32_t);
        Sums sums;
        each([&](int r, int p) { sums[r][p] = number<int32_t>(r, kZeroSum) - IntLanes{}; });
        if constexpr (kKeepsP) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                if (number<int32_t>(r, offsetof(BlockNumbers, is_wide)) != 0) [[unlikely]] {
                    add_upper<kHalf>(r, sums[r]);
                }
            }
        }
        const uint8_t* block = hidden_block();
#pragma GCC unroll 4
        for (int u = kHalf * kHalfUnits; u < (kHalf + 1) * kHalfUnits; ++u) {
            PairLanes codes[kPanels];
            codes_at(block, u, codes);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) add_four<kPanels>(sums[r], codes, row(r), u);
        }
        each([&](int r, int p) {
            if constexpr (kKeepsP) {
                constexpr size_t kAt = offsetof(BlockNumbers, multipliers) + kHalf * sizeof(int32_t);
                sums[r][p] *= number<int32_t>(r, kAt) - IntLanes{};
            }
            totals[r][p] += sums[r][p];
        });
    }

    // Of a row of 16 bits.
    template <int kHalf>
    PDSERVE_INLINE void add_upper(int r, IntLanes (&sums)[kPanels]) const {
        const uint8_t* block = hidden_block();
        IntLanes upper[kPanels] = {};
#pragma GCC unroll 4
        for (int u = kHalf * kHalfUnits; u < (kHalf + 1) * kHalfUnits; ++u) {
            PairLanes codes[kPanels];
            codes_at(block, u, codes);
            add_four<kPanels>(upper, codes, upper_ + r * tile_.x_row_bytes, u);
        }
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) sums[p] += upper[p] << 8;
    }

    // The compiler must not know what codes are read again: it would keep them.
    PDSERVE_INLINE const uint8_t* hidden_block() const {
        const uint8_t* block = block_;
        asm("" : "+r"(block));
        return block;
    }

    PDSERVE_INLINE void codes_at(const uint8_t* block, int u, PairLanes (&codes)[kPanels]) const {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
            codes[p] = unit_at<kBits>(block + p * tile_.codes_step, u, v_);
            if constexpr (kScaling == Scaling::kNested) codes[p] = nesting_[p].bytes_of(codes[p]);
        }
    }

    const IntegerTile& tile_;
    const int v_;
    const uint8_t* const block_;
    const uint8_t* const x_;
    const uint8_t* const upper_;
    const int64_t group_;
    Nesting nesting_[kPanels];  // of nested codes
};

template <Scaling kScaling, int kBits, int kRows, int kPanels>
void multiply_integers(const IntegerTile& tile) {
    IntLanes sums[kPanelVectors][kRows][kPanels] = {};
    FloatLanes totals[kPanelVectors][kRows][kPanels] = {};
    const int64_t group_mask = (int64_t{1} << tile.blocks_shift) - 1;
    const uint8_t* block = tile.codes;
    const uint8_t* next = tile.next;
    for (int64_t b = 0; b < tile.num_blocks; ++b) {
        if (tile.is_ahead) {
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                prefetch(block + p * tile.codes_step + codes_ahead(kBits), kBits * kUnitBytes);
            }
        }
        if (tile.next_bytes > 0) prefetch(next, static_cast<int>(tile.next_bytes));
        next += tile.next_bytes;
        const bool ends_group = ((b + 1) & group_mask) == 0 || b + 1 == tile.num_blocks;
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            AddBlock<kScaling, kBits, kRows, kPanels>(tile, b, v, block)
                .run(sums[v], totals[v], ends_group);
        }
        block += kBits * kUnitBytes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        float scale;
        __builtin_memcpy(&scale, tile.x + r * tile.x_row_bytes + tile.num_blocks * kRowBlockBytes,
            sizeof(scale));
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; ++v) {
                store(tile.sums + r * tile.sum_stride + p * kPanelOutputs + v * kLanes,
                    totals[v][r][p] * splat(scale));
            }
        }
    }
}

using IntegerTileFunction = void (*)(const IntegerTile&);

// For 1 to N rows, at [rows - 1].
template <Scaling kScaling, int kBits, int kPanels, int... kIndex>
IntegerTileFunction pick_rows(int num_rows, std::integer_sequence<int, kIndex...>) {
    static constexpr IntegerTileFunction kFunctions[] = {
        multiply_integers<kScaling, kBits, kIndex + 1, kPanels>...};
    return kFunctions[num_rows - 1];
}

template <Scaling kScaling, int kBits>
IntegerTileFunction pick_panels(int num_rows, int num_panels) {
    constexpr std::make_integer_sequence<int, kMostIntegerRows> kRows{};
    return num_panels == 1
        ? pick_rows<kScaling, kBits, 1>(num_rows, kRows)
        : pick_rows<kScaling, kBits, kMostIntegerPanels>(num_rows, kRows);
}

template <Scaling kScaling>
IntegerTileFunction pick_bits(int bits, int num_rows, int num_panels) {
    switch (bits) {
        case 4: return pick_panels<kScaling, 4>(num_rows, num_panels);
        case 5: return pick_panels<kScaling, 5>(num_rows, num_panels);
        case 6: return pick_panels<kScaling, 6>(num_rows, num_panels);
        default: return pick_panels<kScaling, 8>(num_rows, num_panels);
    }
}

IntegerTileFunction pick_integer_tile(Scaling scaling, int bits, int num_rows, int num_panels) {
    switch (scaling) {
        case Scaling::kNone: return pick_panels<Scaling::kNone, 8>(num_rows, num_panels);
        case Scaling::kBlock: return pick_bits<Scaling::kBlock>(bits, num_rows, num_panels);
        case Scaling::kBlockAndMinimum:
            return pick_bits<Scaling::kBlockAndMinimum>(bits, num_rows, num_panels);
        case Scaling::kHalves: return pick_bits<Scaling::kHalves>(bits, num_rows, num_panels);
        case Scaling::kNested: return pick_panels<Scaling::kNested, 4>(num_rows, num_panels);
        case Scaling::kHalvesAndMinimums: break;
    }
    return pick_bits<Scaling::kHalvesAndMinimums>(bits, num_rows, num_panels);
}

}  // namespace
}  // namespace pdserve::linear
