// Puts rows of a weight matrix into their places in a packed matrix.
#pragma once

#include <cstdint>

#include "layout.h"

namespace pdserve::linear {

struct PackTarget {
    WeightType type;
    int64_t num_out;
    int64_t num_in;
    bool is_gated;
    uint8_t* weights;
    float* scales;  // [panels * 16] or null
};

// Rows of num_in contiguous elements.
struct PackSource {
    const void* rows;
    bool is_bfloat16;  // else float32
    int64_t stride;    // elements between rows
    int64_t num_rows;
};

// Packs the rows of `source` as rows first_row, first_row + 1, ... of the matrix, with zeros where
// a panel has fewer rows. int8: w ~ scale * round(w / scale), scale = max |w| / 127, for each row.
// Uses the ThreadPool. Returns the first row of the matrix with a value that is not finite, which
// int8 cannot represent (the matrix is then unusable), or -1.
int64_t pack_rows(const PackSource& source, const PackTarget& target, int64_t first_row);

}  // namespace pdserve::linear
