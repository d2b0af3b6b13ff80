// Changes to single logits of a row: forbidden tokens, biases, penalties.
#pragma once

#include <cstdint>
#include <vector>

namespace pdserve::sampling {

struct Bias {
    int64_t token_id;
    float amount;
};

struct Edits {
    std::vector<int64_t> forbidden;  // cannot be chosen in this step
    std::vector<Bias> biases;  // no id twice
    std::vector<int64_t> prompt;  // empty where there is no repetition penalty
    std::vector<int64_t> output;
    float repetition_penalty;  // 1: none
    double frequency_penalty;
    double presence_penalty;
};

// Applied in this order: forbidden tokens, biases, repetition penalty, the other penalties. Ids
// outside of the vocabulary are ignored. counts: [vocab_size] zeros, and zeros again afterwards.
void apply(const Edits& edits, float* logits, int64_t vocab_size, int32_t* counts);

}  // namespace pdserve::sampling
