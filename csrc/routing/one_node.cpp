#include "one_node.h"

#include <algorithm>
#include <cmath>

namespace pdserve::routing {

namespace {

// Tokens that a prompt that has begun gets in any case, whatever was promised to streams.
constexpr int64_t kLeastChunk = 16;

// A step of a batch of streams with a chunk of a prompt.
struct MixedStep {
    int64_t rows;  // of streams
    int64_t context;  // of theirs
    double step_s;
    double without_s;  // the same without the chunk
    double alone_s;  // the chunk's part of a step of prompts only

    // The progress of the prompt per second, relative to a node without streams.
    double speed() const { return alone_s / step_s; }
};

int64_t largest_chunk(const Node& node, int64_t rows, double beside_s, double limit_s) {
    const int64_t most = std::max<int64_t>(node.token_budget - rows, 1);
    if (rows == 0 || std::isinf(limit_s)) return most;
    const int64_t fits = node.most_tokens(limit_s / node.prefill_ratio - beside_s) - rows;
    return std::min(std::max(fits, std::min(most, kLeastChunk)), most);
}

MixedStep mixed_step(const Node& node, const Batch& batch, double limit_s) {
    const int64_t rows = std::clamp<int64_t>(batch.requests, 0, node.max_batch - 1);
    // The time that the streams add, apart from their number of tokens.
    const double beside_s = node.sampled_s * rows + node.context_s * batch.context;
    const int64_t chunk = largest_chunk(node, rows, beside_s, limit_s);
    const double full_s = node.full_step_s * node.prefill_ratio;
    return {
        .rows = rows,
        .context = batch.context,
        .step_s = (node.seconds[chunk + rows] + beside_s) * node.prefill_ratio,
        .without_s = (node.seconds[rows] + beside_s) * node.prefill_ratio,
        .alone_s = chunk * (full_s / node.token_budget),
    };
}

// The progress of prompts at a node: with the speed of the present moment, then of each later one;
// the speed of the last moment holds from there on.
class Progress {
public:
    Progress(const FleetView& view, const Node& node, int64_t slot)
        : view_(view), node_(node), slot_(slot), step_(at(0)) {}

    // The step at a moment.
    MixedStep at(int64_t moment) const {
        return mixed_step(node_, view_.batch(slot_, moment * kStride), view_.newcomer().limit_s);
    }

    MixedStep in(double seconds) const {
        return at(view_.nearest_bucket(seconds / view_.bucket_s()) / kStride);
    }

    // Seconds until prompts are done that would take `alone_s` on a node without streams. `alone_s`
    // must not be less than in the previous call.
    double takes_s(double alone_s) {
        double left_s = alone_s - done_s_;
        while (moment_ + 1 < num_moments() && left_s >= step_.speed() * moment_s()) {
            done_s_ += step_.speed() * moment_s();
            left_s = alone_s - done_s_;
            step_ = at(++moment_);
        }
        return moment_ * moment_s() + left_s / step_.speed();
    }

private:
    double moment_s() const { return kStride * view_.bucket_s(); }
    int64_t num_moments() const { return (view_.num_buckets() + kStride - 1) / kStride; }

    const FleetView& view_;
    const Node& node_;
    int64_t slot_;
    int64_t moment_ = 0;
    MixedStep step_;  // at that moment
    double done_s_ = 0.0;  // before it
};

// Whether a batch lacks a place for the newcomer at some time, `from_s` to `until_s` from now.
bool is_crowded(const FleetView& view, int64_t slot, double from_s, double until_s) {
    const int64_t last = view.bucket_in(until_s);
    for (int64_t ahead = view.bucket_in(from_s); ahead <= last; ahead += kStride) {
        if (!view.joining(slot, ahead).has_place) return true;
    }
    return false;
}

}  // namespace

Outcome on_one_node(
    const FleetView& view, int64_t slot, const Prompt& prompt, const Promise& promise) {
    const Node node = view.node(slot);
    const Newcomer& newcomer = view.newcomer();
    Progress progress(view, node, slot);
    Outcome outcome;
    outcome.begins_s = progress.takes_s(prompt.queue_s);
    const double ends_s = progress.takes_s(prompt.queue_s + prompt.prompt_s);
    const MixedStep step = progress.in(outcome.begins_s);
    // It takes at least one step, however small the prompt is.
    const double first_s = std::min(step.step_s, prompt.prompt_s + step.without_s);
    outcome.ttft_s = std::max(ends_s, outcome.begins_s + first_s);

    const auto [with_s, has_place] = view.joining(slot, view.bucket_in(outcome.ttft_s));
    outcome.is_full = !has_place;
    const double stall_s = step.rows > 0 ? std::max(step.step_s - with_s, 0.0) : 0.0;
    // Share of its steps that will contain chunks of other prompts. Future prompts are unknown, so
    // as many are expected as were queued before it. Its own chunks are done before its token 1.
    const double share = outcome.begins_s / step.step_s / promise.output_tokens;
    outcome.stalled_s = std::min(share, 1.0) * stall_s;
    outcome.tpot_s = with_s + outcome.stalled_s;
    const double ends_life_s = outcome.ttft_s + promise.output_tokens * outcome.tpot_s;
    outcome.crowds = is_crowded(view, slot, outcome.ttft_s, ends_life_s);

    const double num_steps = prompt.prompt_s / step.alone_s;  // that its chunks take part in
    const double stalls_s = step.rows * stall_s * num_steps / promise.output_tokens;
    outcome.harm = stalls_s / promise.tpot_s;
    if (prompt.num_queued > 0) {
        // This stream slows queued prompts down: the first stream of a node most. If the queue is
        // longer than the promise, its end is late anyway, so only the part in time counts.
        const Batch with_it{step.rows + 1, step.context + newcomer.context};
        const double slower = mixed_step(node, with_it, newcomer.limit_s).speed();
        const double lost = std::max(step.speed() - slower, 0.0);
        const double paced_s = std::isinf(newcomer.limit_s) ? 0.0 : newcomer.limit_s;
        const double lost_s = lost * promise.output_tokens * std::max(with_s, paced_s);
        const double in_time = std::min(promise.ttft_s / std::max(prompt.queue_s, 1e-9), 1.0);
        outcome.harm += prompt.num_queued * in_time * lost_s / promise.ttft_s;
    }
    return outcome;
}

}  // namespace pdserve::routing
