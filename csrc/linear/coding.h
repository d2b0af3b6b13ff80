// Coded matrices: weights as files of quantised models have them, and the order in which they are
// packed.
//
//     weight = rounded(scale * (code - zero) - minimum)
//
// in float32, with a scale, and perhaps a minimum, for each group of an output's inputs. Products of
// integers (kernels/integers/integer_product.cpp) read the codes themselves. If x is float32,
// they are widened to panels of it (layout.h) just before they are used, and so products have the
// bits that they would have if the weights had been packed so.
//
// Nested codes are of 4 bits, and make such of 8: scales and minimums are integers times a number that
// 256 inputs share, and scale * code - minimum is -128 to 127 times that. So products of integers have
// one sum for all of these inputs.
//
// A panel is 16 outputs, as ever; one value of each output, side by side, is a row of lanes. A unit
// is a cache line with a byte for each of 4 inputs of each output: [16][4], as instructions multiply
// them. In the order in which a product with few rows reads it, since memory is fastest so:
//     supers     if there are two levels, [num_in / 256] rows of float16, of scales; as many of
//                minimums, but for nested codes
//     scales     [num_in / group] rows
//     minimums   likewise
//     codes      from a whole line on, [num_in / 32] blocks of 32 inputs:
//                8 bits:  8 units
//                others:  4 units of the codes' lower four bits, and above them those of the 4 units
//                after; then, of 5 bits, a line whose bits 0 to 7 of a byte are the fifth ones of
//                that byte in the 8 units; of 6, two lines, with the upper two bits in 4 units each
// What does not fill a block or 256 inputs is padded with zeros.
//
// No inline functions with external linkage here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "layout.h"

namespace pdserve::linear {

enum class ScaleType {
    kFloat16,
    kFloat32,
    kTwoLevels,  // int8, times a float16 that 256 inputs share
    kNested,     // likewise; minimums share it, too
};

// What weights are rounded to.
enum class Rounding { kNone, kFloat16, kBFloat16 };

struct Coding {
    int bits;   // of a code: 4, 5, 6 or 8; 0: the matrix is not coded
    int group;  // inputs with the same scale: a multiple of 16 that divides 256
    int zero;   // taken away from each code
    ScaleType scale;
    bool has_minimums;  // of the same type
    Rounding rounding;

    bool is_nested() const { return scale == ScaleType::kNested; }
};

constexpr int kBlockInputs = 32;
constexpr int kSuperInputs = 256;

// Bytes from the start of a panel.
struct CodedLayout {
    // To whole blocks: sums beyond the inputs are 0, which a number that is none would not leave so.
    int64_t padded_groups() const { return num_groups + num_groups % 2; }

    int64_t num_panels;
    int64_t num_groups;
    int64_t num_supers;  // 0: there is one level
    int block_bytes;
    int scale_bytes;  // of one
    int64_t super_scales;
    int64_t super_minimums;
    int64_t scales;
    int64_t minimums;
    int64_t numbers_end;
    int64_t codes;
    int64_t panel_bytes;
};

namespace {

[[maybe_unused]] CodedLayout coded_layout_of(
    const Coding& coding, int64_t num_out, int64_t num_in, bool is_gated) {
    const auto rounded_up = [&](int64_t unit) { return (num_in + unit - 1) / unit; };
    const int64_t half = is_gated ? num_out / 2 : num_out;
    const bool has_supers = coding.scale == ScaleType::kTwoLevels || coding.is_nested();
    CodedLayout layout{};
    layout.num_panels = (half + kPanelOutputs - 1) / kPanelOutputs * (is_gated ? 2 : 1);
    layout.num_groups = rounded_up(coding.group);
    layout.num_supers = has_supers ? rounded_up(kSuperInputs) : 0;
    layout.block_bytes = coding.bits * kBlockInputs * kPanelOutputs / 8;
    layout.scale_bytes = has_supers ? 1 : coding.scale == ScaleType::kFloat16 ? 2 : 4;
    const int64_t scales_bytes = layout.num_groups * kPanelOutputs * layout.scale_bytes;
    const int64_t supers_bytes = layout.num_supers * kPanelOutputs * 2;
    layout.super_scales = 0;
    layout.super_minimums = coding.is_nested() ? 0 : supers_bytes;
    layout.scales = supers_bytes * (coding.has_minimums && !coding.is_nested() ? 2 : 1);
    layout.minimums = layout.scales + scales_bytes;
    layout.numbers_end = layout.minimums + (coding.has_minimums ? scales_bytes : 0);
    layout.codes = (layout.numbers_end + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
    layout.panel_bytes = layout.codes + rounded_up(kBlockInputs) * layout.block_bytes;
    return layout;
}

}  // namespace

}  // namespace pdserve::linear
