// Adds B (A x) of adapters to the sums of a product. For each output, ranks are summed in ascending
// order, whatever rows are beside it.
#pragma once

#include "kernel.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

// Sums that are about to be finished: of some rows and some consecutive panels.
struct SumPart {
    float* sums;
    int64_t sum_stride;
    int64_t first_row;
    int64_t num_rows;
    int64_t first_lane;
    int num_lanes;
};

// Panels computed together, as their sums are chains of additions that wait for each other.
constexpr int kExpandedPanels = kLanes == 16 ? 2 : 1;

// For kRows rows of one adapter, and kPanels panels that follow each other and all get something.
// What the next part will read of B is fetched meanwhile.
template <class Reader, int kRows, int kPanels>
PDSERVE_INLINE void expand_rows(const Expansion& expansion, int64_t panel, int panels_ahead,
    const float* const* inner, float* sums, int64_t sum_stride) {
    constexpr int kVectors = kPanels * kPanelVectors;
    FloatLanes totals[kRows][kVectors];
    const float* bias =
        expansion.bias == nullptr ? nullptr : expansion.bias + panel * kPanelOutputs;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        const FloatLanes start = bias == nullptr ? splat(0.0f) : load(bias + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) totals[r][v] = start;
    }
    const float* factors =
        expansion.factors == nullptr ? nullptr : expansion.factors + panel * kPanelOutputs;
    const int64_t num_units = expansion.width / Reader::kSteps;
    const int64_t panel_bytes = num_units * kUnitBytes;
    const auto* unit = static_cast<const uint8_t*>(expansion.weights) + panel * panel_bytes;
    for (int64_t u = 0; u < num_units; ++u, unit += kUnitBytes) {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
            prefetch(unit + (p + panels_ahead) * panel_bytes, kUnitBytes);
        }
#pragma GCC unroll 2
        for (int step = 0; step < Reader::kSteps; ++step) {
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) {
                FloatLanes weights[kPanelVectors];
                Reader::read(unit + p * panel_bytes, step, weights);
                const int64_t rank =
                    expansion.first_ranks[panel + p] + u * Reader::kSteps + step;
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    const FloatLanes x = splat(inner[r][rank]);
#pragma GCC unroll 4
                    for (int v = 0; v < kPanelVectors; ++v) {
                        FloatLanes& total = totals[r][p * kPanelVectors + v];
                        total = multiply_add(total, weights[v], x);
                    }
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            float* y = sums + r * sum_stride + v * kLanes;
            const FloatLanes base = load(y);
            // Fused in all of these loops, or rows beside it would change a row's bits.
            store(y, factors == nullptr ? base + totals[r][v]
                                        : multiply_add(totals[r][v], base, load(factors + v * kLanes)));
        }
    }
}

template <class Reader, int kPanels>
void expand_panels(const Expansion& expansion, const float* const* inner, const SumPart& part,
    int lane, int64_t first, int64_t end) {
    const int64_t panel = (part.first_lane + lane) / kPanelOutputs;
    const int ahead = part.num_lanes / kPanelOutputs;
    float* const sums = part.sums + lane;
    const int64_t stride = part.sum_stride;
    int64_t r = first;
    for (; r + 4 <= end; r += 4) {
        expand_rows<Reader, 4, kPanels>(
            expansion, panel, ahead, inner + r, sums + r * stride, stride);
    }
    for (; r + 2 <= end; r += 2) {
        expand_rows<Reader, 2, kPanels>(
            expansion, panel, ahead, inner + r, sums + r * stride, stride);
    }
    if (r < end) {
        expand_rows<Reader, 1, kPanels>(
            expansion, panel, ahead, inner + r, sums + r * stride, stride);
    }
}

template <class Reader>
void expand_run(const Expansion& expansion, const float* const* inner, const SumPart& part,
    int64_t first, int64_t end) {
    const int num_panels = part.num_lanes / kPanelOutputs;
    const int32_t* of = expansion.first_ranks + part.first_lane / kPanelOutputs;
    for (int p = 0; p < num_panels;) {
        const int lane = p * kPanelOutputs;
        if (of[p] < 0) {
            ++p;
        } else if (kExpandedPanels == 2 && p + 1 < num_panels && of[p + 1] >= 0) {
            expand_panels<Reader, kExpandedPanels>(expansion, inner, part, lane, first, end);
            p += 2;
        } else {
            expand_panels<Reader, 1>(expansion, inner, part, lane, first, end);
            ++p;
        }
    }
}

// Rows of one adapter that follow each other read its B together.
void expand(const Delta& delta, const SumPart& part) {
    const Expansion* const* of = delta.expansions + part.first_row;
    const float* const* inner = delta.inner + part.first_row;
    for (int64_t first = 0, end = 0; first < part.num_rows; first = end) {
        end = first + 1;
        while (end < part.num_rows && of[end] == of[first]) ++end;
        if (of[first] == nullptr) continue;
        const auto run = of[first]->is_bfloat16 ? expand_run<ReadBFloat16> : expand_run<ReadFloat32>;
        run(*of[first], inner, part, first, end);
    }
}

}  // namespace
}  // namespace pdserve::linear
