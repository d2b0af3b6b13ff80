// The order of a packed matrix, the same for all instruction sets.
//
// 16 outputs make a panel, in which they stand side by side, so that a vector of weights meets one
// element of x (or one pair) and every output has a lane of its own:
//     float32   [panels][num_in][16]
//     bfloat16  [panels][pairs][16][2], two consecutive inputs to a pair
//     int8      [panels][pairs][16][2], a panel padded to 64 bytes
// What is not there is zero: outputs up to a whole panel, the second input of the last pair.
// Gated: panel 2i holds 16 outputs of the upper half (gate), panel 2i + 1 the same 16 of the lower
// half (up), each half padded to whole panels.
//
// No inline functions with external linkage here; see ../element.h for why.
#pragma once

#include <cstdint>

namespace pdserve::linear {

enum class WeightType { kFloat32, kBFloat16, kInt8 };

constexpr int kPanelOutputs = 16;

// Counts of a matrix in panels, and in units: what stands together of one output, 1 or 2 inputs.
struct Layout {
    int64_t num_panels;
    int64_t num_units;   // of a panel
    int64_t unit_bytes;  // for 16 outputs
    int64_t panel_bytes;
};

namespace {

[[maybe_unused]] Layout layout_of(
    WeightType type, int64_t num_out, int64_t num_in, bool is_gated) {
    const int64_t half = is_gated ? num_out / 2 : num_out;
    Layout layout;
    layout.num_panels = (half + kPanelOutputs - 1) / kPanelOutputs * (is_gated ? 2 : 1);
    layout.num_units = type == WeightType::kFloat32 ? num_in : (num_in + 1) / 2;
    layout.unit_bytes = type == WeightType::kInt8 ? 32 : 64;
    layout.panel_bytes = (layout.num_units * layout.unit_bytes + 63) / 64 * 64;
    return layout;
}

}  // namespace

}  // namespace pdserve::linear
