// Which rows of a matrix are in which panel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout.h"

namespace pdserve::linear {
namespace {

// Consecutive rows of the matrix that are in one panel.
struct PanelRows {
    int64_t panel;
    int lane;          // of the first row
    int count;
    bool ends_matrix;  // the lanes after the last row are padding
    int64_t row;       // of the matrix

    // After the lanes that these rows determine.
    int end_lane() const { return ends_matrix ? kPanelOutputs : lane + count; }
};

// The runs of panel rows of [first, last) of a matrix, or of one of the halves of a gated one.
class Runs {
public:
    Runs(int64_t num_out, bool is_gated, int64_t first, int64_t last)
        : is_gated_(is_gated), half_(is_gated ? num_out / 2 : num_out), first_(first), last_(last) {
        // A gated matrix has two halves, and the last panel of a half may be partly filled.
        split_ = is_gated_ ? std::clamp(half_, first, last) : last;
        num_in_first_ = split_ > first_ ? num_runs(first_, split_) : 0;
        count_ = num_in_first_ + (last_ > split_ ? num_runs(split_ - half_, last_ - half_) : 0);
    }

    int64_t count() const { return count_; }

    PanelRows at(int64_t index) const {
        const bool is_second = index >= num_in_first_;
        const int64_t half_start = is_second ? half_ : 0;
        const int64_t first = (is_second ? split_ : first_) - half_start;
        const int64_t last = (is_second ? last_ : split_) - half_start;
        const int64_t panel = first / kPanelOutputs + index - (is_second ? num_in_first_ : 0);
        const int64_t start = std::max(first, panel * kPanelOutputs);
        const int64_t end = std::min(last, (panel + 1) * kPanelOutputs);
        return {is_gated_ ? 2 * panel + is_second : panel,
            static_cast<int>(start % kPanelOutputs), static_cast<int>(end - start), end == half_,
            start + half_start};
    }

private:
    static int64_t num_runs(int64_t first, int64_t last) {
        return (last + kPanelOutputs - 1) / kPanelOutputs - first / kPanelOutputs;
    }

    bool is_gated_;
    int64_t half_;
    int64_t first_;
    int64_t last_;
    int64_t split_;
    int64_t num_in_first_;
    int64_t count_;
};

}  // namespace
}  // namespace pdserve::linear
