// What becomes of a request that one node does alone, and of the others there.
//
// Its prompt is computed beside streams: in chunks, which are as large as the token budget and the
// TPOT that it was promised allow (Sarathi-Serve); the same is taken to hold for the prompts that
// are queued there. A batch that is full leaves next to nothing to prompts, but not for long, since
// its streams end. So what counts are the batches to come, and not the one of now. And each step
// with a chunk in it makes streams wait, while each stream takes its part of the steps from
// prompts: who places a request where it is best for the request alone makes it worse for all
// (`harm`).
#pragma once

#include <cstdint>

#include "fleet_view.h"

namespace pdserve::routing {

// Buckets of the calendar between two looks at it.
constexpr int64_t kStride = 8;

// A request's prompt, at one node.
struct Prompt {
    double queue_s;  // what goes before it: so much of prefill
    double prompt_s;  // alone
    int64_t num_queued;  // prompts there
};

// What is promised, or usual where nothing is, and how long the answer will be.
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
    double num_steps;  // that the prompt takes part in
    bool is_full;  // there is no place in the batch when token 1 is there
    bool crowds;  // there is none at some time of its life: others are on their way there
};

Outcome on_one_node(
    const FleetView& view, int64_t slot, const Prompt& prompt, const Promise& promise);

}  // namespace pdserve::routing
