// Hands the residual stream from a pipeline stage to the next one, in the order of the parts of a
// step.
//
//     | Control | 2 slots |
//
// Two parts may be under way: the first stage computes one while the next has not taken the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "counter.h"

namespace pdserve::ranks {

class StageLink {
public:
    static size_t memory_bytes();

    // `num_takers`: the ranks of the later stage.
    StageLink(char* memory, int num_takers, Loss& loss);

    // One rank of the earlier stage gives rows that fit into a slot, when there is room.
    // Throws RanksLost.
    void give(const float* rows, int64_t num_floats);

    // Each rank of the later stage takes them, when they are there. Throws RanksLost.
    void take(float* rows, int64_t num_floats);

private:
    struct Control;

    Control& control_;
    char* const slots_;
    const uint32_t num_takers_;
    Loss& loss_;
    uint32_t number_ = 0;  // of what this rank has given or taken
};

}  // namespace pdserve::ranks
