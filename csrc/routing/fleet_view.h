// All nodes at one moment, from the view of one request. `node` and `batch` do not check slots: the
// entry points have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <nanobind/nanobind.h>

#include "column.h"
#include "node.h"

namespace pdserve::routing {

// The newcomer's step in a batch, and whether it has a place there.
struct Joining {
    double step_s;
    bool has_place;
};

class FleetView {
public:
    // Reads the attributes that the protocols in _native.pyi list.
    // Raises TypeError or ValueError: an array has a wrong type or size, or an index is out of
    // range.
    FleetView(nanobind::handle tables, nanobind::handle nodes, nanobind::handle loads,
        nanobind::handle calendar, double now_s, const Newcomer& newcomer,
        nanobind::handle yielding);

    int64_t num_slots() const { return row_.size(); }
    int64_t num_buckets() const { return requests_.size(0); }
    double bucket_s() const { return bucket_s_; }
    double now_s() const { return now_s_; }
    const Newcomer& newcomer() const { return newcomer_; }

    Node node(int64_t slot) const {
        const int64_t row = row_[slot];
        const int64_t first = row * seconds_.size(1);
        return {
            .seconds = seconds_.data() + first,
            .rising = rising_.data() + first,
            .num_tabulated = num_tabulated_[row],
            .token_budget = token_budget_[row],
            .max_batch = max_batch_[row],
            .full_step_s = full_step_s_[row],
            .sampled_s = sampled_s_[row],
            .pair_s = pair_s_[row],
            .context_s = context_s_[row],
            .prefill_ratio = prefill_ratio_[slot],
            .decode_ratio = decode_ratio_[slot],
            .kv_tokens = kv_tokens_[slot],
            .kv_companions = kv_companions_[slot],
            .kv_seen = kv_seen_[slot],
            .kv_state = kv_state_[slot],
        };
    }

    // What a node is expected to decode `ahead` buckets from now; after the last bucket, the same
    // as in it.
    Batch batch(int64_t slot, int64_t ahead) const {
        const int64_t bucket = (present_ + std::min(ahead, num_buckets() - 1)) % num_buckets();
        const int64_t at = bucket * num_slots() + slot;
        return {requests_[at] + others_[slot], tokens_[at] + others_context_[slot]};
    }

    // The newcomer in a batch, in which requests may have to give it their places.
    Joining joining(int64_t slot, int64_t ahead) const {
        const Node node = this->node(slot);
        const Batch all = batch(slot, ahead);
        const double step_s = node.with_s(all, newcomer_);
        if (node.has_place(all, newcomer_, step_s)) return {step_s, true};
        const Batch kept = all.first(all.requests - yielding_[slot]);
        const double kept_s = node.with_s(kept, newcomer_);
        if (kept.requests == all.requests || !node.has_place(kept, newcomer_, kept_s)) {
            return {step_s, false};
        }
        // No more give way than must.
        const double full_s = node.with_s(all.first(node.max_batch - 1), newcomer_);
        return {std::max(kept_s, std::min(full_s, newcomer_.limit_s)), true};
    }

    // The bucket that is `seconds` from now, counted from the present one.
    int64_t bucket_in(double seconds) const {
        const double moment_s = now_s_ + seconds;
        // Python's floor division, which the calendar uses.
        const double bucket = std::round((moment_s - std::fmod(moment_s, bucket_s_)) / bucket_s_);
        return nearest_bucket(bucket - present_);
    }

    // The nearest bucket: the last one for everything later, the first one for NaN.
    int64_t nearest_bucket(double ahead) const {
        return static_cast<int64_t>(std::fmin(std::fmax(ahead, 0.0), num_buckets() - 1.0));
    }

    double pull_s(int64_t slot, int64_t num_tokens) const {
        const double held = has_windows_
            ? held_tokens({1, num_tokens}, kv_companions_[slot], kv_seen_[slot])
            : static_cast<double>(num_tokens);
        return pull_fixed_s_[slot] + pull_token_s_[slot] * held;
    }
    double tier_s(int64_t slot, int64_t num_tokens) const {
        return tier_fixed_s_[slot] + tier_token_s_[slot] * num_tokens;
    }

private:
    void check_tables() const;
    void check_slots() const;
    void check_calendar() const;

    using Floats = Column<const double>;
    using Ints = Column<const int64_t>;
    // By row of the tables.
    Floats seconds_, rising_;  // [num_rows, most tokens + 1]
    Ints num_tabulated_, token_budget_, max_batch_;
    Floats full_step_s_, sampled_s_, pair_s_, context_s_;
    // By slot.
    Ints row_, kv_tokens_, kv_companions_, kv_seen_, kv_state_;
    bool has_windows_ = false;  // whether blocks have companions anywhere; most models have none
    Floats prefill_ratio_, decode_ratio_;
    Floats pull_fixed_s_, pull_token_s_, tier_fixed_s_, tier_token_s_;
    Ints others_, others_context_, yielding_;
    // The calendar, a ring of buckets: [num_buckets, num_slots].
    Ints requests_, tokens_;
    int64_t present_;
    double bucket_s_;
    double now_s_;
    Newcomer newcomer_;
};

}  // namespace pdserve::routing
