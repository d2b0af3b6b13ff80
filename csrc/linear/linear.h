// Products with packed weight matrices, for the decoder. Unchecked: the callers have checked all
// arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../isa/cpu.h"
#include "coding.h"
#include "layout.h"
#include "result.h"

namespace pdserve::linear {

// A [num_out, num_in] matrix in the kernels' own order, which layout.h or, if it is coded, coding.h
// describes. Borrowed.
struct PackedMatrix {
    WeightType type;
    Coding coding;  // if that is its type
    int64_t num_out;
    int64_t num_in;
    bool is_gated;        // gate above up: made for gated results
    const void* weights;  // aligned to 64 bytes
    const float* scales;   // [groups of inputs][panels * 16] in the panels' order; null: none
    int64_t scale_stride;  // from a group's scales to the next one's; 0: there is one group
    const float* bias;     // [panels * 16] in the panels' order; null: none
};

struct Product {
    const PackedMatrix* matrix;
    const void* x;  // [num_rows, num_in], bfloat16 if is_bfloat16, else float32
    bool is_bfloat16;
    int64_t x_stride;  // elements between rows
    int64_t num_rows;
    Result result;  // gated if and only if the matrix is
    void* out;
    int64_t out_stride;  // elements between rows
    Delta delta{};
};

// Uses the ThreadPool. A row of the result depends, bit for bit, only on the same row of x: not on
// the number of rows or threads.
void multiply(const Product& product, Variant variant);

// Several products at once: the threads share out all of them together. Their results are those of
// one after the other.
void multiply_all(const Product* products, size_t count, Variant variant);

}  // namespace pdserve::linear
