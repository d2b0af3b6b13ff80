// The possible results of a product.
#pragma once

#include <cstdint>

namespace pdserve::linear {

// How y = x . matrix^T + bias is stored. "Same type": the type of x.
enum class Result {
    kStore,       // out = y, same type
    kStoreFloat,  // out = y, float32
    kAdd,         // out += y, float32: the residual stream
    kGatedSilu,   // out[:, i] = silu(gate_i) * up_i, same type, num_out / 2 columns
    kGatedGelu,   // likewise gelu(gate_i) * up_i, by tanh
};

constexpr bool is_gated(Result result) {
    return result == Result::kGatedSilu || result == Result::kGatedGelu;
}

// What some rows of y get besides, before it is stored: that of adapters.
struct Delta {
    // [rows that have any, stride] float32, with a column for each output of the matrix. Of a gated
    // one, the lower half begins in the middle: halves are padded to whole panels.
    const float* rows;  // null: no row gets anything
    int64_t stride;
    const int32_t* places;  // of each row of y: which of `rows` it gets; -1: none
};

}  // namespace pdserve::linear
