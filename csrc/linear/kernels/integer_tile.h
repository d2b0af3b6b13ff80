// The product of a few rows of integers and a panel of codes, with the sums in registers.
#pragma once

#include <utility>

#include "dot.h"
#include "read_codes.h"

namespace pdserve::linear {
namespace {

// Computed together, as registers hold them.
constexpr int kMostIntegerRows = kLanes / 2;

// What is done with the sums of a block; integers.h.
enum class Scaling {
    kNone,  // at the end, by others
    kBlock,
    kBlockAndMinimum,
    kHalves,
    kHalvesAndMinimums,
};

struct IntegerTile {
    const uint8_t* x;
    int64_t x_row_bytes;
    const uint8_t* codes;
    int64_t num_blocks;
    Scaling scaling;
    const float* scales;    // [groups][16]
    const float* minimums;  // likewise
    int blocks_shift;     // a group has 2**this blocks
    const uint8_t* next;  // to be fetched: so many bytes a block
    int64_t next_bytes;
    bool is_ahead;  // so are the codes, before their use
    float* sums;    // [rows][sum_stride]
    int64_t sum_stride;
};

// How far ahead codes are fetched, in bytes, as measured.
constexpr int64_t codes_ahead(int bits) { return bits == 8 ? 4096 : 8192; }

// A row's sums of half a block, times the row's scale.
template <int kPlanes>
PDSERVE_INLINE FloatLanes half_sum(const CodeUnits& units, const uint8_t* row, int half) {
    const auto zero_sum = number_at<int32_t>(
        row, kPlanes, offsetof(BlockNumbers, zero_sums) + half * sizeof(int32_t));
    const auto scale =
        number_at<float>(row, kPlanes, offsetof(BlockNumbers, scales) + half * sizeof(float));
    const IntLanes sum = add_half<kPlanes>(zero_sum - IntLanes{}, units, row, half);
    return __builtin_convertvector(sum, FloatLanes) * splat(scale);
}

// Adds a block to the totals of a vector of the panel.
template <Scaling kScaling, int kPlanes, int kRows>
PDSERVE_INLINE void add_block(const IntegerTile& tile, int64_t b, int v, const uint8_t* x,
    const CodeUnits* units, FloatLanes* totals) {
    constexpr bool kIsHalves =
        kScaling == Scaling::kHalves || kScaling == Scaling::kHalvesAndMinimums;
    constexpr bool kHasMinimums =
        kScaling == Scaling::kBlockAndMinimum || kScaling == Scaling::kHalvesAndMinimums;
    const int64_t group = kIsHalves ? 2 * b : b >> tile.blocks_shift;
    const auto number = [&](const float* numbers, int64_t of) {
        return load(numbers + of * kPanelOutputs + v * kLanes);
    };
    const auto sum = [&](const uint8_t* row, size_t offset) {
        return splat(number_at<float>(row, kPlanes, offset));
    };
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        const uint8_t* row = x + r * tile.x_row_bytes;
        const FloatLanes first = half_sum<kPlanes>(units[0], row, 0);
        const FloatLanes second = half_sum<kPlanes>(units[1], row, 1);
        FloatLanes y;
        if constexpr (kIsHalves) {
            y = first * number(tile.scales, group) + second * number(tile.scales, group + 1);
        } else {
            y = first + second;
            if constexpr (kScaling != Scaling::kNone) y = y * number(tile.scales, group);
        }
        if constexpr (kHasMinimums && kIsHalves) {
            y = y
                - (number(tile.minimums, group) * sum(row, offsetof(BlockNumbers, sums))
                    + number(tile.minimums, group + 1)
                        * sum(row, offsetof(BlockNumbers, sums) + sizeof(float)));
        } else if constexpr (kHasMinimums) {
            y = y - number(tile.minimums, group) * sum(row, offsetof(BlockNumbers, sum));
        }
        totals[r] = totals[r] + y;
    }
}

template <int kBits, int kPlanes, int kRows>
void multiply_integers(const IntegerTile& tile) {
    FloatLanes totals[kPanelVectors][kRows] = {};
    const uint8_t* block = tile.codes;
    const uint8_t* x = tile.x;
    const uint8_t* next = tile.next;
    for (int64_t b = 0; b < tile.num_blocks; ++b) {
        if (tile.is_ahead) prefetch(block + codes_ahead(kBits), kBits * kUnitBytes);
        if (tile.next_bytes > 0) prefetch(next, static_cast<int>(tile.next_bytes));
        next += tile.next_bytes;
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const CodeUnits units[2] = {
                half_units<kBits>(block, 0, v), half_units<kBits>(block, 1, v)};
            const auto add = [&]<Scaling kScaling>() {
                add_block<kScaling, kPlanes, kRows>(tile, b, v, x, units, totals[v]);
            };
            switch (tile.scaling) {
                case Scaling::kNone: add.template operator()<Scaling::kNone>(); break;
                case Scaling::kBlock: add.template operator()<Scaling::kBlock>(); break;
                case Scaling::kBlockAndMinimum:
                    add.template operator()<Scaling::kBlockAndMinimum>();
                    break;
                case Scaling::kHalves: add.template operator()<Scaling::kHalves>(); break;
                case Scaling::kHalvesAndMinimums:
                    add.template operator()<Scaling::kHalvesAndMinimums>();
                    break;
            }
        }
        block += kBits * kUnitBytes;
        x += row_block_bytes(kPlanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            store(tile.sums + r * tile.sum_stride + v * kLanes, totals[v][r]);
        }
    }
}

using IntegerTileFunction = void (*)(const IntegerTile&);

// For 1 to N rows, at [rows - 1].
template <int kBits, int kPlanes, int... kIndex>
IntegerTileFunction pick_rows(int num_rows, std::integer_sequence<int, kIndex...>) {
    static constexpr IntegerTileFunction kFunctions[] = {
        multiply_integers<kBits, kPlanes, kIndex + 1>...};
    return kFunctions[num_rows - 1];
}

template <int kPlanes>
IntegerTileFunction pick_integer_tile(int bits, int num_rows) {
    constexpr std::make_integer_sequence<int, kMostIntegerRows> kRows{};
    switch (bits) {
        case 4: return pick_rows<4, kPlanes>(num_rows, kRows);
        case 5: return pick_rows<5, kPlanes>(num_rows, kRows);
        case 6: return pick_rows<6, kPlanes>(num_rows, kRows);
        default: return pick_rows<8, kPlanes>(num_rows, kRows);
    }
}

}  // namespace
}  // namespace pdserve::linear
