// Products with packed weight matrices: what the decoder asks, checked nowhere but by its callers.
#pragma once

#include <cstdint>

#include "../cpu.h"
#include "layout.h"
#include "result.h"

namespace pdserve::linear {

// A [num_out, num_in] matrix in the kernels' own order, which layout.h describes. Borrowed.
struct PackedMatrix {
    WeightType type;
    int64_t num_out;
    int64_t num_in;
    bool is_gated;        // gate above up: made for Result::kGatedSilu
    const void* weights;  // aligned to 64 bytes
    const float* scales;  // [panels * 16] in the panels' order; null unless the weights are int8
    const float* bias;    // [panels * 16] in the panels' order; null: none
};

struct Product {
    const PackedMatrix* matrix;
    const void* x;  // [num_rows, num_in], bfloat16 if is_bfloat16, else float32
    bool is_bfloat16;
    int64_t x_stride;  // elements between rows
    int64_t num_rows;
    Result result;  // kGatedSilu if and only if the matrix is gated
    void* out;
    int64_t out_stride;  // elements between rows
};

// Shares the work among the ThreadPool. The bits of a row of the result depend on that row of x
// alone: not on how many rows there are, nor on the threads.
void multiply(const Product& product, Variant variant);

}  // namespace pdserve::linear
