#include "deltas.h"

#include <algorithm>
#include <cstring>

namespace pdserve::decoder {

using linear::Result;

linear::Delta Deltas::of(const linear::PackedMatrix& matrix, const void* x, int64_t num_rows,
    const Adapter* const* adapters, int64_t x_stride) {
    additions_.resize(num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
        const bool is_as_before = row > 0 && adapters[row] == adapters[row - 1];
        additions_[row] = is_as_before       ? additions_[row - 1]
            : adapters[row] == nullptr ? nullptr
                                             : adapters[row]->find(matrix);
    }
    return compute(x, matrix.num_in, x_stride);
}

linear::Delta Deltas::compute(const void* x, int64_t num_in, int64_t x_stride) {
    sort_rows();
    if (segments_.empty()) return {};
    const int64_t element_bytes = is_bfloat16_ ? 2 : 4;
    const int64_t row_bytes = num_in * element_bytes;
    const int64_t stride = x_stride > 0 ? x_stride : num_in;
    const auto* rows = static_cast<const char*>(x);
    gather(rows, row_bytes, stride * element_bytes);
    shrink(rows, row_bytes, stride);
    return {expansions_.data(), inner_rows_.data()};
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
        places_[row] = segment.first_place + segment.count++;
    }
}

// Brings the rows of a segment together, unless they are.
void Deltas::gather(const char* x, int64_t row_bytes, int64_t stride_bytes) {
    const Segment& last = segments_.back();
    auto* to = static_cast<char*>(
        gathered_.at_least((last.first_place + last.count) * row_bytes));
    for (size_t row = 0; row < places_.size(); ++row) {
        if (places_[row] < 0 || segments_[segment_of_[row]].is_in_place) continue;
        std::memcpy(to + places_[row] * row_bytes, x + row * stride_bytes, row_bytes);
    }
}

// A x of all segments.
void Deltas::shrink(const char* x, int64_t row_bytes, int64_t x_stride) {
    int64_t num_numbers = 0;
    for (const Segment& segment : segments_) num_numbers += segment.count * segment.addition->a.num_out;
    auto* inner = static_cast<float*>(inner_.at_least(num_numbers * sizeof(float)));
    const auto* const gathered = static_cast<const char*>(gathered_.at_least(0));
    const int64_t stride_bytes = x_stride * (is_bfloat16_ ? 2 : 4);
    products_.clear();
    for (const Segment& segment : segments_) {
        const linear::PackedMatrix& a = segment.addition->a;
        products_.push_back({
            .matrix = &a,
            .x = segment.is_in_place ? x + segment.first_row * stride_bytes
                                     : gathered + segment.first_place * row_bytes,
            .is_bfloat16 = is_bfloat16_,
            .x_stride = segment.is_in_place ? x_stride : a.num_in,
            .num_rows = segment.count,
            .result = Result::kStoreFloat,
            .out = inner,
            .out_stride = a.num_out,
        });
        inner += segment.count * a.num_out;
    }
    expansions_.assign(additions_.size(), nullptr);
    inner_rows_.assign(additions_.size(), nullptr);
    for (size_t row = 0; row < additions_.size(); ++row) {
        if (segment_of_[row] < 0) continue;
        const linear::Product& product = products_[segment_of_[row]];
        const Segment& segment = segments_[segment_of_[row]];
        expansions_[row] = &segment.addition->b;
        inner_rows_[row] = static_cast<const float*>(product.out)
            + (places_[row] - segment.first_place) * product.out_stride;
    }
    linear::multiply_all(products_.data(), products_.size(), variant_);
}

}  // namespace pdserve::decoder
