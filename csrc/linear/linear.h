// Products with packed weight matrices: what the decoder asks, checked nowhere but by its callers.
#pragma once

#include <cstdint>

#include "../cpu.h"

namespace pdserve::linear {

enum class WeightType { kFloat32, kBFloat16, kInt8 };

// A [num_out, num_in] matrix in the kernels' own order, which pack.h describes. Borrowed.
struct PackedMatrix {
    WeightType type;
    int64_t num_out;
    int64_t num_in;
    const void* weights;   // aligned to 64 bytes
    const float* scales;   // [num_out]; null unless the weights are int8
    const float* bias;     // [num_out]; null: none
};

// What becomes of y = x . matrix^T + bias. "Same type" is that of x.
enum class Result {
    kStore,      // out = y, same type
    kStoreFloat, // out = y, float32
    kAdd,        // out += y, float32: the residual stream
    kGatedSilu,  // out[:, i] = silu(gate_i) * up_i, same type, num_out / 2 columns; the matrix was
                 // packed with is_gated
};

struct Product {
    const PackedMatrix* matrix;
    const void* x;  // [num_rows, num_in], bfloat16 if is_bfloat16, else float32
    bool is_bfloat16;
    int64_t x_stride;  // elements between rows
    int64_t num_rows;
    Result result;
    void* out;
    int64_t out_stride;  // elements between rows
};

// Shares the work among the ThreadPool. The bits of a row of the result depend on that row of x
// alone: not on how many rows there are, nor on the threads.
void multiply(const Product& product, Variant variant);

}  // namespace pdserve::linear
