// Products of a model's matrices, with the rows of a step.
#pragma once

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
        const linear::Product product{
            .matrix = &matrix,
            .x = x,
            .is_bfloat16 = is_bfloat16_,
            .x_stride = matrix.num_in,
            .num_rows = num_rows,
            .result = result,
            .out = out,
            .out_stride = out_stride > 0 ? out_stride
                : matrix.is_gated        ? matrix.num_out / 2
                                         : matrix.num_out,
            .delta = adapters == nullptr ? linear::Delta{}
                                         : deltas_.of(matrix, x, num_rows, adapters),
        };
        linear::multiply(product, variant_);
    }

    // What adapters add to products of several matrices at once.
    Deltas& deltas() const { return deltas_; }

private:
    const bool is_bfloat16_;
    const Variant variant_;
    mutable Deltas deltas_;  // only its working memory changes
};

}  // namespace pdserve::decoder
