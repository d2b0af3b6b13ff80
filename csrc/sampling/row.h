// One row, from its logits to its token and log-probabilities.
#pragma once

#include <cstdint>
#include <vector>

#include "../scratch_buffer.h"
#include "edits.h"
#include "kernel.h"

namespace pdserve::sampling {

// In the binary layout that pdserve/engine/sampling/sampler.py packs.
struct RowParams {
    double temperature;  // 0: greedy
    double top_p;  // 1: off
    double min_p;  // 0: off
    int64_t top_k;  // 0: off
    uint64_t seed;
    uint64_t position;
    int64_t num_logprobs;  // -1: no log-probabilities; else how many besides the token's own
};

struct Row {
    const float* logits;  // [vocab_size]
    int64_t vocab_size;
    RowParams params;
    const uint32_t* mask;  // [ceil(vocab_size / 32)] bit i: token i may be chosen; null: any may
    const Edits* edits;  // null: none
};

constexpr int64_t kUnusable = -1;  // in place of a token: the peak of the row is not finite

struct Choice {
    int64_t token_id = kUnusable;
    float logprob = 0.0f;
    std::vector<int32_t> top_ids;  // the likeliest, the lowest id first among equals
    std::vector<float> top_logprobs;
};

// The working memory of a thread. Grows to the largest vocabulary so far.
class Workspace {
public:
    void reserve(int64_t vocab_size);

    double* block_sums;
    float* logits;  // edited
    float* weights;
    float* spare;

private:
    ScratchBuffer memory_;
};

// A pure function of the row; the workspace carries no state between calls.
Choice choose(const Row& row, const Kernels& kernels, Workspace& workspace);

}  // namespace pdserve::sampling
