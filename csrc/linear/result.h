// The possible results of a product.
#pragma once

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

}  // namespace pdserve::linear
