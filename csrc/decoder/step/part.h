// Some rows of a step, as a step of their own: pipeline stages compute different parts of a step at
// the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "inputs.h"
#include "../model.h"

namespace pdserve::decoder {

class Part {
public:
    // Rows [first, end) of the step. A request that has rows before and after them has only those
    // before in its context. Borrows the arrays of `whole`.
    Part(const Inputs& whole, int64_t first, int64_t end, const Sizes& sizes);
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    const Inputs& inputs() const { return inputs_; }

private:
    Inputs inputs_;
    std::vector<int32_t> query_start_;
    std::vector<int32_t> context_lens_;
    std::vector<int64_t> sampled_;
    std::vector<int64_t> states_;
};

}  // namespace pdserve::decoder
