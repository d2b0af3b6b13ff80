// Layers with a state, over a step's requests, whose states are in blocks of the pool.
#pragma once

#include <cstdint>

#include "../attention/layer.h"
#include "../isa/cpu.h"
#include "kernel.h"

namespace pdserve::recurrent {

// Where the states of a step's requests are: blocks, one behind the other.
struct States {
    char* pool;  // of bytes
    int64_t block_bytes;
    const int32_t* tables;  // [num_requests, 3, num_blocks]: its own, where it is before the step,
                            // and where it is kept
    int64_t num_blocks;
    const int32_t* kept_after;  // [num_requests] rows of the step, after which it is; 0: it is not

    const int32_t* own(int64_t request) const { return tables + 3 * request * num_blocks; }
    const int32_t* before(int64_t request) const { return own(request) + num_blocks; }
    const int32_t* kept(int64_t request) const { return before(request) + num_blocks; }
};

struct Layer {
    Shape shape;
    Weights weights;
    int64_t number;       // among those with a state
    const float* inputs;  // [num_tokens, input_width], as `recurrent_in` makes them
    void* out;            // [num_tokens, num_groups * group_size * value_dim]
    bool to_bfloat16;
};

// Numbers of a request in one group.
int64_t group_state(const Shape& shape);

// Numbers of a row that `recurrent_in` makes.
int64_t input_width(const Shape& shape);

// Goes on with the states of all requests. Arguments are not checked here.
void mix(const Layer& layer, const attention::Step& step, const States& states, Variant variant);

}  // namespace pdserve::recurrent
