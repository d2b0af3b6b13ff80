// The order of a packed matrix, the same for all instruction sets.
//
// A panel is 16 outputs, side by side: a vector of weights is multiplied by one element of x (or
// one pair), and each output has its own lane. A unit is the cache line that holds 1, 2 or 4
// consecutive inputs of a panel:
//     float32   [panels][num_in][16]
//     bfloat16  [panels][num_in / 2][16][2]
//     int8      [panels][num_in / 4][16][4], each as a byte that is greater by 128
//     fp8       likewise, as e4m3
// Padded with zeros: outputs to a whole panel, inputs to a whole unit, and of bytes to 32. In a gated matrix, panel 2i
// holds 16 outputs of the upper half (gate), panel 2i + 1 the same 16 of the lower half (up). Each
// half is padded to whole panels.
//
// No inline functions with external linkage here; see isa/element.h for why.
#pragma once

#include <cstdint>

namespace pdserve::linear {

enum class WeightType { kFloat32, kBFloat16, kInt8, kFp8, kCoded };

constexpr int kNumForms = 4;  // without coded ones, for which see coding.h

constexpr int kPanelOutputs = 16;

constexpr int kUnitBytes = 64;

constexpr int kInt8Zero = 128;  // what stands for 0

// What distinguishes the forms of weights: a row for each type, in its order.
struct FormTraits {
    const char* name;  // as in pdserve/engine/plan/forms.py
    int unit_inputs;   // of each output
    int whole_inputs;  // a panel has a multiple of these
    bool has_scales;   // of float32, one for each output, or for a group of its inputs
    int group_inputs;  // that share a scale; 0: all
};

struct Layout {
    int64_t num_panels;
    int64_t num_units;  // of a panel
    int unit_inputs;
    int64_t panel_bytes;
};

namespace {

constexpr FormTraits kForms[kNumForms] = {
    {"float32", 1, 1, false, 0},
    {"bfloat16", 2, 2, false, 0},
    {"int8", 4, 32, true, 0},
    {"fp8", 4, 32, true, 0},
};

[[maybe_unused]] constexpr const FormTraits& traits_of(WeightType type) {
    return kForms[static_cast<int>(type)];
}

[[maybe_unused]] Layout layout_of(
    WeightType type, int64_t num_out, int64_t num_in, bool is_gated) {
    const int64_t half = is_gated ? num_out / 2 : num_out;
    Layout layout;
    layout.num_panels = (half + kPanelOutputs - 1) / kPanelOutputs * (is_gated ? 2 : 1);
    const int whole = traits_of(type).whole_inputs;
    layout.unit_inputs = traits_of(type).unit_inputs;
    layout.num_units = (num_in + whole - 1) / whole * whole / layout.unit_inputs;
    layout.panel_bytes = layout.num_units * kUnitBytes;
    return layout;
}

}  // namespace

}  // namespace pdserve::linear
