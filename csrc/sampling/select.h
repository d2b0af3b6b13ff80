// The threshold of a filter, without sorting: radix selection on the bits of the weights.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace pdserve::sampling {

// What a token counts for: 1, or its weight.
enum class Amount { kOne, kWeight };

// The largest weight v such that the tokens with weights from v up amount to `wanted` or more; 0 if
// even all tokens with weights above 0 do not.
//
// weights: [num], zeros included or not; least: v is not below it, as the caller knows; wanted:
// above 0; spare: room for num + 16, overwritten.
float select(const Kernels& kernels, const float* weights, int64_t num, float least, Amount amount,
    double wanted, float* spare);

}  // namespace pdserve::sampling
