#include "deltas.h"

#include <algorithm>
#include <cstring>

namespace pdserve::decoder {

using linear::Result;

namespace {

constexpr int64_t kFewestRows = 64;
constexpr int64_t kBytesAtOnce = 4 << 20;

}  // namespace

int64_t Deltas::columns_of(const linear::PackedMatrix& matrix) {
    constexpr int64_t panel = linear::kPanelOutputs;
    const int64_t half = matrix.is_gated ? matrix.num_out / 2 : matrix.num_out;
    return (half + panel - 1) / panel * panel * (matrix.is_gated ? 2 : 1);
}

int64_t Deltas::rows_at_once(const linear::PackedMatrix& matrix) {
    const int64_t row_bytes = columns_of(matrix) * static_cast<int64_t>(sizeof(float));
    return std::max(kFewestRows, kBytesAtOnce / row_bytes);
}

linear::Delta Deltas::of(const linear::PackedMatrix& matrix, const void* x, int64_t num_rows,
    const Adapter* const* adapters) {
    additions_.resize(num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
        const bool is_as_before = row > 0 && adapters[row] == adapters[row - 1];
        additions_[row] = is_as_before       ? additions_[row - 1]
            : adapters[row] == nullptr ? nullptr
                                             : adapters[row]->find(matrix);
    }
    return compute(x, matrix.num_in, columns_of(matrix));
}

linear::Delta Deltas::compute(const void* x, int64_t num_in, int64_t columns) {
    sort_rows();
    if (segments_.empty()) return {};
    const int64_t row_bytes = num_in * (is_bfloat16_ ? 2 : 4);
    const auto* rows = static_cast<const char*>(x);
    gather(rows, row_bytes);
    shrink(rows, row_bytes);
    expand(columns);
    return {static_cast<const float*>(delta_.at_least(0)), columns, places_.data()};
}

// Finds the segments, and gives each of their rows a place.
void Deltas::sort_rows() {
    const auto num_rows = static_cast<int64_t>(additions_.size());
    segments_.clear();
    segment_of_.assign(num_rows, -1);
    for (int64_t row = 0; row < num_rows; ++row) {
        const Addition* own = additions_[row];
        if (own == nullptr) continue;
        if (row > 0 && own == additions_[row - 1]) {
            segment_of_[row] = segment_of_[row - 1];
        } else {
            size_t known = 0;
            while (known < segments_.size() && segments_[known].addition != own) ++known;
            if (known == segments_.size()) segments_.push_back({own, 0, 0, row, true});
            segment_of_[row] = static_cast<int32_t>(known);
        }
        Segment& segment = segments_[segment_of_[row]];
        segment.is_in_place = segment.is_in_place && row == segment.first_row + segment.count;
        ++segment.count;
    }
    int64_t place = 0;
    for (Segment& segment : segments_) {
        segment.first_place = place;
        place += segment.count;
        segment.count = 0;  // counted again below
    }
    places_.assign(num_rows, -1);
    for (int64_t row = 0; row < num_rows; ++row) {
        if (segment_of_[row] < 0) continue;
        Segment& segment = segments_[segment_of_[row]];
        places_[row] = static_cast<int32_t>(segment.first_place + segment.count++);
    }
}

// Brings the rows of a segment together, unless they are.
void Deltas::gather(const char* x, int64_t row_bytes) {
    const Segment& last = segments_.back();
    auto* to = static_cast<char*>(
        gathered_.at_least((last.first_place + last.count) * row_bytes));
    for (size_t row = 0; row < places_.size(); ++row) {
        if (places_[row] < 0 || segments_[segment_of_[row]].is_in_place) continue;
        std::memcpy(to + places_[row] * row_bytes, x + row * row_bytes, row_bytes);
    }
}

// A x of all segments.
void Deltas::shrink(const char* x, int64_t row_bytes) {
    int64_t num_bytes = 0;
    inner_starts_.clear();
    for (const Segment& segment : segments_) {
        inner_starts_.push_back(num_bytes);
        const int64_t ranks = segment.addition->a.num_out;
        num_bytes += (segment.count * ranks * 4 + 63) / 64 * 64;
    }
    auto* const inner = static_cast<char*>(inner_.at_least(num_bytes));
    const auto* const gathered = static_cast<const char*>(gathered_.at_least(0));
    products_.clear();
    for (size_t i = 0; i < segments_.size(); ++i) {
        const Segment& segment = segments_[i];
        const linear::PackedMatrix& a = segment.addition->a;
        products_.push_back({
            .matrix = &a,
            .x = segment.is_in_place ? x + segment.first_row * row_bytes
                                     : gathered + segment.first_place * row_bytes,
            .is_bfloat16 = is_bfloat16_,
            .x_stride = a.num_in,
            .num_rows = segment.count,
            .result = segment.addition->is_wide ? Result::kStoreFloat : Result::kStore,
            .out = inner + inner_starts_[i],
            .out_stride = a.num_out,
        });
    }
    linear::multiply_all(products_.data(), products_.size(), variant_);
}

// B (A x) + bias of all segments, each piece in its columns.
void Deltas::expand(int64_t columns) {
    const Segment& last = segments_.back();
    const int64_t num_rows = last.first_place + last.count;
    auto* const delta = static_cast<float*>(delta_.at_least(num_rows * columns * sizeof(float)));
    const auto* const inner = static_cast<const char*>(inner_.at_least(0));
    products_.clear();
    for (size_t i = 0; i < segments_.size(); ++i) {
        const Segment& segment = segments_[i];
        const Addition& addition = *segment.addition;
        float* const rows = delta + segment.first_place * columns;
        if (addition.num_columns < columns) {
            std::memset(rows, 0, segment.count * columns * sizeof(float));
        }
        const bool is_bfloat16 = is_bfloat16_ && !addition.is_wide;
        for (const Piece& piece : addition.pieces) {
            products_.push_back({
                .matrix = &piece.b,
                .x = inner + inner_starts_[i] + piece.first_rank * (is_bfloat16 ? 2 : 4),
                .is_bfloat16 = is_bfloat16,
                .x_stride = addition.a.num_out,
                .num_rows = segment.count,
                .result = Result::kStoreFloat,
                .out = rows + piece.first_column,
                .out_stride = columns,
            });
        }
    }
    linear::multiply_all(products_.data(), products_.size(), variant_);
}

}  // namespace pdserve::decoder
