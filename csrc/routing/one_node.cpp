#include "one_node.h"

#include <algorithm>
#include <cmath>

namespace pdserve::routing {

namespace {

// Tokens that a prompt that has begun gets in any case, whatever was promised to streams. It only
// begins when there is time for so many, or when the rest of its TTFT is needed to compute it.
constexpr int64_t kLeastChunk = 16;
constexpr double kSafety = 0.9;  // share of a TTFT that nodes aim at

// A step of a batch of streams with a chunk of a prompt.
struct MixedStep {
    int64_t rows;  // of streams
    int64_t context;  // of theirs
    double step_s;
    double without_s;  // the same without the chunk
    double alone_s;  // the chunk's part of a step of prompts only
    int64_t fits;  // tokens of prompts with which the streams keep their TPOT; below 1: none
    int64_t most;  // that the token budget leaves

    // Whether a prompt of so many tokens would begin in it.
    bool begins(int64_t num_tokens) const {
        return fits >= std::min({num_tokens, kLeastChunk, most});
    }

    // The progress of the prompt per second, relative to a node without streams.
    double speed() const { return alone_s / step_s; }

    // By which the streams are stalled, all together, by work that takes `prompt_s` alone.
    double stalls_s(double prompt_s) const {
        return rows * (step_s - without_s) * prompt_s / alone_s;
    }
};

// The most tokens of prompts with which a step stays within the limit; below 1 if none.
int64_t fitting_chunk(
    const Node& node, int64_t rows, double beside_s, double limit_s, int64_t most) {
    if (rows == 0 || std::isinf(limit_s)) return most;
    return std::min(node.most_tokens(limit_s / node.prefill_ratio - beside_s) - rows, most);
}

MixedStep mixed_step(const Node& node, const Batch& batch, double limit_s) {
    const int64_t rows = std::clamp<int64_t>(batch.requests, 0, node.max_batch - 1);
    // The time that the streams add, apart from their number of tokens.
    const double beside_s = node.sampled_s * rows + node.context_s * batch.context;
    const int64_t most = std::max<int64_t>(node.token_budget - rows, 1);
    const int64_t fits = fitting_chunk(node, rows, beside_s, limit_s, most);
    const int64_t chunk = std::max(fits, std::min(most, kLeastChunk));
    const double token_s = node.full_step_s * node.prefill_ratio / node.token_budget;
    return {
        .rows = rows,
        .context = batch.context,
        .step_s = (node.seconds[chunk + rows] + beside_s) * node.prefill_ratio,
        .without_s = (node.seconds[rows] + beside_s) * node.prefill_ratio,
        .alone_s = chunk * token_s,
        .fits = fits,
        .most = most,
    };
}

// The work of a node on prompts, beside the streams of the present moment, then of each later one;
// those of the last moment stay. Requests will be handed off to the node in the meantime, so later
// moments have at least as many streams as usual.
class Progress {
public:
    Progress(const FleetView& view, const Node& node, int64_t slot)
        : view_(view), node_(node), slot_(slot), step_(at(0)) {}

    // The step at the time that was reached.
    const MixedStep& step() const { return step_; }

    // By which streams were stalled, all together, since the work began or waited.
    double stalls_s() const { return stalls_s_; }

    // Does what would take `alone_s` on a node without streams; returns when that is done.
    double computes_s(double alone_s) {
        while (!is_last() && alone_s >= step_.speed() * (next_s() - now_s_)) {
            alone_s -= step_.speed() * (next_s() - now_s_);
            stalls_s_ += step_.stalls_s(step_.speed() * (next_s() - now_s_));
            now_s_ = next_s();
            step_ = at(++moment_);
        }
        stalls_s_ += step_.stalls_s(alone_s);
        return now_s_ += alone_s / step_.speed();
    }

    // Waits until the streams let a prompt of so many tokens begin, but not beyond `until_s`;
    // returns when that is.
    double waits_s(int64_t num_tokens, double until_s) {
        stalls_s_ = 0.0;
        while (!step_.begins(num_tokens) && now_s_ < until_s) {
            now_s_ = is_last() ? until_s : std::min(next_s(), until_s);
            if (!is_last()) step_ = at(++moment_);
        }
        return now_s_;
    }

private:
    MixedStep at(int64_t moment) const {
        Batch batch = view_.batch(slot_, moment * kStride);
        const Batch usual = view_.usual(slot_);
        if (moment > 0 && usual.requests > batch.requests) batch = usual;
        return mixed_step(node_, batch, view_.newcomer().limit_s);
    }
    double next_s() const { return (moment_ + 1) * kStride * view_.bucket_s(); }
    bool is_last() const {
        return moment_ + 1 >= (view_.num_buckets() + kStride - 1) / kStride;
    }

    const FleetView& view_;
    const Node& node_;
    int64_t slot_;
    int64_t moment_ = 0;
    MixedStep step_;  // at that moment
    double now_s_ = 0.0;  // from the decision on
    double stalls_s_ = 0.0;
};

// Whether a batch lacks a place for the newcomer at some time, `from_s` to `until_s` from now.
bool is_crowded(
    const FleetView& view, const Node& node, int64_t slot, double from_s, double until_s) {
    const int64_t last = view.bucket_in(until_s);
    for (int64_t ahead = view.bucket_in(from_s); ahead <= last; ahead += kStride) {
        const Batch batch = view.batch(slot, ahead);
        const double with_s = node.with_s(batch, view.newcomer());
        if (!node.has_place(batch, view.newcomer(), with_s)) return true;
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
    outcome.begins_s = progress.computes_s(prompt.queue_s);
    const MixedStep found = progress.step();
    outcome.num_steps = prompt.prompt_s / found.alone_s;
    const double needed_s = prompt.prompt_s / found.speed();
    const int64_t num_tokens = node.most_tokens(prompt.prompt_s / node.prefill_ratio);
    const double until_s = kSafety * promise.ttft_s - needed_s;
    const double starts_s = progress.waits_s(std::max<int64_t>(num_tokens, 1), until_s);
    const MixedStep step = progress.step();
    const double ends_s = progress.computes_s(prompt.prompt_s);
    // It takes at least one step, however small the prompt is.
    const double first_s = std::min(step.step_s, prompt.prompt_s + step.without_s);
    outcome.ttft_s = std::max(ends_s, starts_s + first_s);

    const Batch batch = view.batch(slot, view.bucket_in(outcome.ttft_s));
    const double with_s = node.with_s(batch, newcomer);
    outcome.is_full = !node.has_place(batch, newcomer, with_s);
    const double stall_s = step.rows > 0 ? std::max(step.step_s - with_s, 0.0) : 0.0;
    // Share of its steps that will contain chunks of other prompts. Future prompts are unknown, so
    // as many are expected as were queued before it. Its own chunks are done before its token 1.
    const double share = outcome.begins_s / step.step_s / promise.output_tokens;
    outcome.stalled_s = std::min(share, 1.0) * stall_s;
    outcome.tpot_s = with_s + outcome.stalled_s;
    const double ends_life_s = outcome.ttft_s + promise.output_tokens * outcome.tpot_s;
    outcome.crowds = is_crowded(view, node, slot, outcome.ttft_s, ends_life_s);

    outcome.harm = progress.stalls_s() / promise.output_tokens / promise.tpot_s;
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
