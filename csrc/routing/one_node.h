// Predicts the outcome of a request that one node does alone, and its effect on others there.
//
// Its prompt is computed beside streams, in chunks as large as the token budget and its promised
// TPOT allow (Sarathi-Serve); the same is assumed of the prompts that are queued there. A full
// batch leaves little time to prompts, but its streams end soon, so the expected batches of the
// next buckets count, not only the present one. Each step with a chunk makes streams wait, and each
// stream takes some of the time of steps from prompts. So the best place for the request alone may
// be worse for all; `harm` measures this.
#pragma once

#include <cstdint>

#include "fleet_view.h"

namespace pdserve::routing {

// The calendar is sampled every kStride buckets.
constexpr int64_t kStride = 8;

// A request's prompt, at one node.
struct Prompt {
    double queue_s;  // what goes before it: so much of prefill
    double prompt_s;  // alone
    int64_t num_queued;  // prompts there
};

// The promised latencies, or usual ones without a promise, and the expected output length.
struct Promise {
    double ttft_s;
    double tpot_s;
    int64_t output_tokens;
};

struct Outcome {
    double begins_s;  // the prompt
    double ttft_s;
    double tpot_s;  // without a wait for a place
    double stalled_s;  // of it: behind chunks of prompts
    double harm;  // added to the TTFT and TPOT of others, in units of what they were promised
    bool is_full;  // there is no place in the batch when token 1 is there
    bool crowds;  // there is none at some time of its life: others are on their way there
};

Outcome on_one_node(
    const FleetView& view, int64_t slot, const Prompt& prompt, const Promise& promise);

}  // namespace pdserve::routing
