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
    kGatedClamped,  // likewise g * sigmoid(1.702 * g) * (u + 1), of g and u clamped at 7
};

constexpr bool is_gated(Result result) {
    return result == Result::kGatedSilu || result == Result::kGatedGelu
        || result == Result::kGatedClamped;
}

// The B of a low-rank matrix B A that is added to a packed one: [outputs, width] in its panels'
// order, each panel of which reads some of the rows of A.
struct Expansion {
    const void* weights;  // [panels][width][16] of float32, or [panels][width / 2][16][2]
    bool is_bfloat16;
    int64_t width;                // even
    const int32_t* first_ranks;   // of each panel; -1: nothing is added to it
    const float* bias;            // [panels * 16], or null
    const float* factors;         // likewise: of what the packed matrix gives, before its bias
};

// What some rows of y get besides, before it is stored: that of adapters.
struct Delta {
    const Expansion* const* expansions;  // of each row of y, or null; null: no row gets anything
    const float* const* inner;           // of each such row, A x
};

}  // namespace pdserve::linear
