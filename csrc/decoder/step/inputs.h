// What a step is to compute.
#pragma once

#include <cstdint>

#include "../../attention/layer.h"
#include "../../recurrent/launch.h"
#include "../adapters/adapter.h"

namespace pdserve::decoder {

// Checked arguments of a step.
struct Inputs {
    const int64_t* token_ids;  // [step.num_tokens]
    const int64_t* positions;  // likewise; -1 - position: the request is a long one
    attention::Step step;      // but for its slots
    attention::Pool pool;
    attention::RowChoice sampled;
    float* logits;  // [sampled.num_rows, vocab]; a rank writes its share of the columns
    attention::RowChoice states{nullptr, 0};  // rows whose final states are wanted besides
    float* states_out;                        // [states.num_rows, hidden], normalised
    const int64_t* taps;  // [num_taps] layers before which sampled rows are copied out
    int64_t num_taps;
    const Adapter* const* adapters;  // of each request, or null; null: none has one
    const int64_t* adapted_from;     // of each request: the first position that its adapter computes
    const int32_t* companions;  // [num_blocks, num_companions]: of the blocks in the tables
    int64_t num_companions;     // 0: all layers of a token are in one block
    const int32_t* places;      // [num_layers, 2]: which block has a layer, and where in it
    recurrent::States states_of_layers;  // without tables: the model has none
    float* taps_out;  // [sampled.num_rows, num_taps, hidden]
};

}  // namespace pdserve::decoder
