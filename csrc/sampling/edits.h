// Changes to single logits of a row: forbidden tokens, biases, penalties.
#pragma once

#include <cstdint>
#include <span>

namespace pdserve::sampling {

using Ids = std::span<const int32_t>;
using Amounts = std::span<const float>;

// Views of arrays that a request keeps between steps. Except for `forbidden`, no id is there twice.
struct Edits {
    Ids forbidden;  // cannot be chosen in this step
    Ids biased;
    Amounts biases;  // added
    Ids seen;  // in prompt or output
    float repetition_penalty;  // of these; 1: none
    Ids output;
    Amounts penalties;  // subtracted
};

// Applied in this order: forbidden tokens, biases, repetition penalty, the other penalties. Ids
// outside of the vocabulary are ignored.
void apply(const Edits& edits, float* logits, int64_t vocab_size);

}  // namespace pdserve::sampling
