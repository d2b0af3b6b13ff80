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

// For kRows rows of one adapter, and one panel.
template <class Reader, int kRows>
PDSERVE_INLINE void expand_rows(const Expansion& expansion, int64_t panel,
    const float* const* inner, float* sums, int64_t sum_stride) {
    FloatLanes totals[kRows][kPanelVectors];
    const float* bias =
        expansion.bias == nullptr ? nullptr : expansion.bias + panel * kPanelOutputs;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
        const FloatLanes start = bias == nullptr ? splat(0.0f) : load(bias + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) totals[r][v] = start;
    }
    const int64_t num_units = expansion.width / Reader::kSteps;
    const auto* unit = static_cast<const uint8_t*>(expansion.weights) + panel * num_units * kUnitBytes;
    const int64_t first = expansion.first_ranks[panel];
    for (int64_t u = 0; u < num_units; ++u, unit += kUnitBytes) {
#pragma GCC unroll 2
        for (int step = 0; step < Reader::kSteps; ++step) {
            FloatLanes weights[kPanelVectors];
            Reader::read(unit, step, weights);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const FloatLanes x = splat(inner[r][first + u * Reader::kSteps + step]);
#pragma GCC unroll 4
                for (int v = 0; v < kPanelVectors; ++v) {
                    totals[r][v] = multiply_add(totals[r][v], weights[v], x);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            float* y = sums + r * sum_stride + v * kLanes;
            store(y, load(y) + totals[r][v]);
        }
    }
}

template <class Reader>
void expand_run(const Expansion& expansion, const float* const* inner, const SumPart& part,
    int64_t first, int64_t end) {
    for (int i = 0; i < part.num_lanes; i += kPanelOutputs) {
        const int64_t panel = (part.first_lane + i) / kPanelOutputs;
        if (expansion.first_ranks[panel] < 0) continue;
        float* sums = part.sums + i;
        int64_t r = first;
        for (; r + 4 <= end; r += 4) {
            expand_rows<Reader, 4>(
                expansion, panel, inner + r, sums + r * part.sum_stride, part.sum_stride);
        }
        for (; r + 2 <= end; r += 2) {
            expand_rows<Reader, 2>(
                expansion, panel, inner + r, sums + r * part.sum_stride, part.sum_stride);
        }
        if (r < end) {
            expand_rows<Reader, 1>(
                expansion, panel, inner + r, sums + r * part.sum_stride, part.sum_stride);
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
