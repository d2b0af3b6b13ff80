// Which kernels compute a product, and in what form they read x.
#pragma once

#include <cstdint>

#include "../isa/cpu.h"
#include "kernels/kernel.h"
#include "linear.h"

namespace pdserve::linear {

struct Form {
    MultiplyFunction multiply;
    ConvertFunction convert;
    bool is_in_place;  // x can be read where it is
    int64_t element_bytes;
    int64_t num_inputs;     // of a converted row: num_in, padded
    int64_t rows_together;  // how many rows are converted in one call; a work item begins with them
    int64_t most_rows;      // of a work item
    int64_t scratch_bytes;  // of a work item

    WidenFunction widen;    // of a coded matrix, for `multiply` to read; else null

    int64_t row_bytes() const { return num_inputs * element_bytes; }
};

// As what the kernels read the weights: a coded matrix is widened to the type of x.
WeightType type_read(const Product& product);

// `layout`: of the matrix, as the kernels read it.
Form form_of(const Product& product, const Layout& layout, Variant variant);

}  // namespace pdserve::linear
