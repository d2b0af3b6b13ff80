// Widens panels of codes to panels of float32, which the products then read.
//
// If there are minimums, products of codes and scales are exact in float32, so that it does not
// matter whether they are fused with the subtraction: all builds make the same weights.
#pragma once

#include "../../isa/simd.h"
#include "kernel.h"
#include "read_codes.h"

namespace pdserve::linear {
namespace {

// Codes of 16 inputs of some outputs: 4 inputs of an output in a lane.
struct CodeUnits {
    PairLanes of[kHalfUnits];
};

// Those of half a block, and of vector v of a panel.
template <int kBits>
PDSERVE_INLINE CodeUnits half_units(const uint8_t* block, int half, int v) {
    CodeUnits units;
#pragma GCC unroll 4
    for (int u = 0; u < kHalfUnits; ++u) {
        units.of[u] = unit_at<kBits>(block, half * kHalfUnits + u, v);
    }
    return units;
}

// Some outputs' codes of two inputs: k, which is even, of a block, and the next.
PDSERVE_INLINE void take_codes(const CodeUnits& units, int k, IntLanes* codes) {
    const PairLanes inputs = units.of[k / 4] >> (8 * (k % 4));
    codes[0] = (IntLanes)(inputs & 0xff);
    codes[1] = (IntLanes)(inputs >> 8 & 0xff);
}

// To the nearest float16, ties to even; below 2**-14 to a multiple of the smallest, 2**-24. (No weight
// is as large as its largest.)
PDSERVE_INLINE FloatLanes rounded_to_half(FloatLanes lanes) {
    const auto bits = (PairLanes)lanes;
    const PairLanes usual = (bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000u;
    const auto magnitude = (FloatLanes)(bits & 0x7fffffff);
    const FloatLanes small = (magnitude + splat(0.75f)) - splat(0.75f);
    const PairLanes tiny = (PairLanes)small | (bits & 0x80000000u);
    return (FloatLanes)(magnitude < splat(0x1p-14f) ? tiny : usual);
}

// As assign() rounds to bfloat16, in the upper half.
PDSERVE_INLINE PairLanes rounded_halves(FloatLanes lanes) {
    const auto bits = (PairLanes)lanes;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

PDSERVE_INLINE FloatLanes rounded(FloatLanes lanes, Rounding to) {
    return to == Rounding::kFloat16 ? rounded_to_half(lanes)
                                    : (FloatLanes)(rounded_halves(lanes) & 0xffff0000u);
}

template <int kBits, bool kHasMinimums, bool kRounds>
void widen_panel(const CodedPanels& panels, const uint8_t* panel, uint8_t* target) {
    const CodedLayout& layout = panels.layout;
    const IntLanes zero = panels.coding.zero - IntLanes{};
    [[maybe_unused]] const Rounding rounding = panels.coding.rounding;
    for (int64_t first = 0; first < panels.num_in; first += kHalfBlock) {
        const uint8_t* block = panel + layout.codes + first / kBlockInputs * layout.block_bytes;
        const int half = first / kHalfBlock % 2;
        const int64_t group = first / panels.coding.group;
        const PanelNumbers scales =
            numbers_at(panels.coding, layout, panel, layout.scales, layout.super_scales, group);
        PanelNumbers minimums{};
        if constexpr (kHasMinimums) {
            minimums = numbers_at(
                panels.coding, layout, panel, layout.minimums, layout.super_minimums, group);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const CodeUnits units = half_units<kBits>(block, half, v);
            uint8_t* lanes = target + v * kLanes * 4;
#pragma GCC unroll 8
            for (int k = 0; k < kHalfBlock; k += 2) {
                IntLanes codes[2];
                take_codes(units, k, codes);
                FloatLanes weights[2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    weights[i] = __builtin_convertvector(codes[i] - zero, FloatLanes);
                    weights[i] = weights[i] * scales.of[v];
                    if constexpr (kHasMinimums) weights[i] = weights[i] - minimums.of[v];
                    if constexpr (kRounds) weights[i] = rounded(weights[i], rounding);
                }
                store(lanes, weights[0]);
                store(lanes + kUnitBytes, weights[1]);
                lanes += 2 * kUnitBytes;
            }
        }
        target += kHalfBlock * kUnitBytes;
    }
}

template <int kBits, bool kHasMinimums, bool kRounds>
void widen_panels(const CodedPanels& panels) {
    for (int p = 0; p < panels.num_panels; ++p) {
        widen_panel<kBits, kHasMinimums, kRounds>(panels,
            panels.start + p * panels.layout.panel_bytes,
            panels.target + p * panels.target_panel_bytes);
    }
}

template <int kBits, bool kHasMinimums>
void widen_rounded(const CodedPanels& panels) {
    panels.coding.rounding != Rounding::kNone ? widen_panels<kBits, kHasMinimums, true>(panels)
                                              : widen_panels<kBits, kHasMinimums, false>(panels);
}

template <int kBits>
void widen_bits(const CodedPanels& panels) {
    panels.coding.has_minimums ? widen_rounded<kBits, true>(panels)
                               : widen_rounded<kBits, false>(panels);
}

void widen_codes(const CodedPanels& panels) {
    switch (panels.coding.bits) {
        case 4: return widen_bits<4>(panels);
        case 5: return widen_bits<5>(panels);
        case 6: return widen_bits<6>(panels);
        default: return widen_bits<8>(panels);
    }
}

}  // namespace
}  // namespace pdserve::linear
