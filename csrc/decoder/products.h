// Products of a model's matrices, with the rows of a step.
#pragma once

#include <cstdint>

#include "../isa/cpu.h"
#include "../linear/linear.h"

namespace pdserve::decoder {

class Products {
public:
    Products(bool is_bfloat16, Variant variant) : is_bfloat16_(is_bfloat16), variant_(variant) {}

    // x is contiguous. out_stride is in elements; 0: so is `out`.
    void multiply(const linear::PackedMatrix& matrix, const void* x, int64_t num_rows,
        linear::Result result, void* out, int64_t out_stride = 0) const {
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
        };
        linear::multiply(product, variant_);
    }

private:
    const bool is_bfloat16_;
    const Variant variant_;
};

}  // namespace pdserve::decoder
