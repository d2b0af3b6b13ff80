// The threshold of a filter, without sorting: radix selection on the bits of the weights.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace pdserve::sampling {

// What is added up for a token: 1, or its weight.
enum class Amount { kOne, kWeight };

// Returns the largest weight v such that the tokens with weights of at least v amount to `wanted`
// or more; 0 if all tokens with weights above 0 amount to less.
//
// weights: [num], may include zeros; least: a known lower bound of v; wanted: above 0; spare: room
// for num + 16, overwritten.
float select(const Kernels& kernels, const float* weights, int64_t num, float least, Amount amount,
    double wanted, float* spare);

}  // namespace pdserve::sampling
