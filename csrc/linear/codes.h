// Puts codes into their places in a coded matrix, and reads rows of one.
#pragma once

#include <cstdint>

#include "linear.h"

namespace pdserve::linear {

// Some rows of codes, one byte each, and of their scales, as coding.h has them. All contiguous.
struct CodeRows {
    int64_t num_rows;
    const uint8_t* codes;           // [rows, num_in]
    const uint8_t* scales;          // [rows, groups] of scale_bytes
    const uint8_t* minimums;        // likewise, or null
    const uint8_t* super_scales;    // [rows, supers] of float16, or null
    const uint8_t* super_minimums;  // likewise
};

// Packs the rows of `source` as rows first_row, first_row + 1, ... of the matrix, with zeros where a
// panel has fewer rows. Uses the ThreadPool.
void pack_codes(const CodeRows& source, const PackedMatrix& matrix, uint8_t* weights,
    int64_t first_row);

// Rows of a table that is a coded matrix, and not gated.
struct CodedLookup {
    const PackedMatrix* table;
    const int64_t* ids;  // [num_rows], all below num_out
    bool to_bfloat16;    // values are rounded to it
    float scale;         // then they are multiplied by it
    float* out;          // [num_rows, num_in], contiguous
};

// Uses the ThreadPool.
void look_up(const CodedLookup& lookup, int64_t num_rows);

}  // namespace pdserve::linear
