// Products of a model's matrices, with the rows of a step.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../isa/cpu.h"
#include "../linear/linear.h"
#include "adapters/deltas.h"

namespace pdserve::decoder {

class Products {
public:
    Products(bool is_bfloat16, Variant variant)
        : is_bfloat16_(is_bfloat16), variant_(variant), deltas_(is_bfloat16, variant) {}

    // x is contiguous. out_stride is in elements; 0: so is `out`. `adapters`: of each row, or null;
    // null: no row has one.
    void multiply(const linear::PackedMatrix& matrix, const void* x, int64_t num_rows,
        linear::Result result, void* out, int64_t out_stride = 0,
        const Adapter* const* adapters = nullptr) const {
        if (out_stride == 0) out_stride = matrix.is_gated ? matrix.num_out / 2 : matrix.num_out;
        const int64_t at_once =
            adapters == nullptr ? num_rows : std::min(num_rows, Deltas::rows_at_once(matrix));
        const bool is_float = result == linear::Result::kStoreFloat || result == linear::Result::kAdd;
        const int64_t out_bytes = out_stride * (is_bfloat16_ && !is_float ? 2 : 4);
        const int64_t x_bytes = matrix.num_in * (is_bfloat16_ ? 2 : 4);
        for (int64_t first = 0; first < num_rows; first += at_once) {
            const auto* rows = static_cast<const char*>(x) + first * x_bytes;
            const int64_t count = std::min(at_once, num_rows - first);
            const linear::Delta delta = adapters == nullptr
                ? linear::Delta{}
                : deltas_.of(matrix, rows, count, adapters + first);
            multiply_rows(matrix, rows, count, result,
                static_cast<char*>(out) + first * out_bytes, out_stride, delta);
        }
    }

    // What adapters add to products of several matrices at once.
    Deltas& deltas() const { return deltas_; }

private:
    void multiply_rows(const linear::PackedMatrix& matrix, const void* x, int64_t num_rows,
        linear::Result result, void* out, int64_t out_stride, const linear::Delta& delta) const {
        const linear::Product product{
            .matrix = &matrix,
            .x = x,
            .is_bfloat16 = is_bfloat16_,
            .x_stride = matrix.num_in,
            .num_rows = num_rows,
            .result = result,
            .out = out,
            .out_stride = out_stride,
            .delta = delta,
        };
        linear::multiply(product, variant_);
    }

    const bool is_bfloat16_;
    const Variant variant_;
    mutable Deltas deltas_;  // only its working memory changes
};

}  // namespace pdserve::decoder
