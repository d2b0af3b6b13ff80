// The slots of a step's tokens in the pool, and their RoPE angles.
#pragma once

#include <cstdint>

#include "../../attention/layer.h"
#include "../model.h"

namespace pdserve::decoder {

// slots[t] of every row: the rows of a request are its newest tokens.
void locate(const attention::Step& step, int block_size, int64_t* slots);

// Of each rope, cos_sin[t] = head_dim / 2 cosines of the row's angles, then the sines.
// Computed in float64, so that every machine rounds to the same float32. Positions as in Inputs.
void turn(const Model& model, const int64_t* positions, int64_t num_tokens, float* cos_sin);

}  // namespace pdserve::decoder
