// The capacity of one node and its step times, by the formulas of `pdserve.measured.perf_model.PerfModel`.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pdserve::routing {

// The requests that a node decodes together at a moment.
struct Batch {
    int64_t requests;
    int64_t context;  // tokens

    // At most so many of these requests, each with the same part of the context.
    Batch first(int64_t most) const {
        const int64_t kept = std::max<int64_t>(most, 0);
        if (kept >= requests) return *this;
        return {kept, static_cast<int64_t>(static_cast<double>(context) * kept / requests)};
    }
};

// What a new request would add to a batch, and the step time that it requires.
struct Newcomer {
    int64_t context;  // tokens that it reads at each step, on average over its life
    int64_t num_tokens;  // of KV at its end
    double limit_s;  // of a step with it; infinite: nothing was promised
};

// Tokens whose whole KV takes as much as this batch holds: `held_tokens` in pdserve/kv/need.py.
// `companions`: of a block, until windows have passed it. `seen`: tokens of a request that windows
// see at most.
inline double held_tokens(const Batch& batch, int64_t companions, int64_t seen) {
    const int64_t in_windows = std::min(batch.context, batch.requests * seen);
    return static_cast<double>(batch.context + companions * in_windows) / (1 + companions);
}

struct Node {
    const double* seconds;  // [num_tabulated + 1] of a step, by tokens
    const double* rising;  // the same, none less than one before it
    int64_t num_tabulated;
    int64_t token_budget;
    int64_t max_batch;
    double full_step_s;  // of a step of the whole budget
    double sampled_s;
    double pair_s;
    double context_s;
    double prefill_ratio;
    double decode_ratio;
    int64_t kv_tokens;  // that there is room for
    int64_t kv_companions, kv_seen;  // see `held_tokens`
    int64_t kv_state;  // tokens for which the blocks of a request's state would have room

    // Time of a prompt alone, in chunks of the budget.
    double prompt_s(int64_t uncached, int64_t cached) const {
        const int64_t full = uncached / token_budget, rest = uncached % token_budget;
        const int64_t pairs = uncached * cached + uncached * (uncached + 1) / 2;
        const double raw_s = full * full_step_s + seconds[rest] + sampled_s + pair_s * pairs;
        return raw_s * prefill_ratio;
    }

    // Time of a decode step. If the batch is larger than max_batch, its requests take turns.
    double decode_s(const Batch& batch) const {
        const int64_t rows = std::clamp<int64_t>(batch.requests, 0, max_batch);
        double raw_s = seconds[rows] + sampled_s * rows;
        if (batch.requests > rows) raw_s *= static_cast<double>(batch.requests) / rows;
        return (raw_s + context_s * batch.context) * decode_ratio;
    }

    // Time of a decode step with the newcomer in the batch.
    double with_s(const Batch& batch, const Newcomer& newcomer) const {
        return decode_s({batch.requests + 1, batch.context + newcomer.context});
    }

    // The batch rule, as in pdserve/rules/batch.py: whether there is a place for the newcomer.
    // `step_s`: `with_s` of the same two.
    bool has_place(const Batch& batch, const Newcomer& newcomer, double step_s) const {
        if (batch.requests == 0) return true;
        return batch.requests < max_batch && step_s <= newcomer.limit_s &&
            has_room({batch.requests + 1, batch.context + newcomer.num_tokens});
    }

    // Whether the KV of this batch fits.
    bool has_room(const Batch& batch) const {
        const int64_t left = kv_tokens - batch.requests * kv_state;
        return batch.context <= left ||  // windows only make it less
            (kv_companions != 0 && held_tokens(batch, kv_companions, kv_seen) <= left);
    }

    // The most tokens whose tabulated time is within the limit; 0 if none.
    int64_t most_tokens(double limit_s) const {
        const double* end = rising + num_tabulated + 1;
        return std::max<int64_t>(std::upper_bound(rising, end, limit_s) - rising - 1, 0);
    }
};

}  // namespace pdserve::routing
