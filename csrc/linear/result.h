// What a product does with what it has computed.
#pragma once

namespace pdserve::linear {

// What becomes of y = x . matrix^T + bias. "Same type" is that of x.
enum class Result {
    kStore,       // out = y, same type
    kStoreFloat,  // out = y, float32
    kAdd,         // out += y, float32: the residual stream
    kGatedSilu,   // out[:, i] = silu(gate_i) * up_i, same type, num_out / 2 columns
};

}  // namespace pdserve::linear
