// Which kernels compute a product, and in what form they read x.
#pragma once

#include <cstdint>

#include "../isa/cpu.h"
#include "kernels/integers/integers.h"
#include "kernels/kernel.h"
#include "linear.h"

namespace pdserve::linear {

struct Form {
    MultiplyFunction multiply;
    ConvertFunction convert;
    QuantiseFunction quantise;  // instead, if these are products of integers; else null
    bool is_in_place;  // x can be read where it is
    int64_t row_bytes;      // of a converted row
    int64_t num_inputs;     // of that: num_in, padded
    int64_t rows_together;  // how many rows are converted in one call; a work item begins with them
    int64_t most_rows;      // of a work item
    int64_t scratch_bytes;  // of a work item
    WidenFunction widen;    // of a coded matrix, for `multiply` to read; else null
};

// Sets the call's layout, as the kernels read the matrix, and returns the form of x.
Form form_of(const Product& product, Variant variant, Call& call);

}  // namespace pdserve::linear
