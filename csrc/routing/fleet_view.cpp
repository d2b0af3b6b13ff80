#include "fleet_view.h"

#include <string>

namespace nb = nanobind;

namespace pdserve::routing {

FleetView::FleetView(nb::handle tables, nb::handle nodes, nb::handle loads, nb::handle calendar,
    double now_s, const Newcomer& newcomer, nb::handle yielding)
    : seconds_(tables.attr("seconds"), "seconds", 2),
      rising_(tables.attr("rising"), "rising", 2),
      num_tabulated_(tables.attr("num_tabulated"), "num_tabulated"),
      token_budget_(tables.attr("token_budget"), "token_budget"),
      max_batch_(tables.attr("max_batch"), "max_batch"),
      full_step_s_(tables.attr("full_step_s"), "full_step_s"),
      sampled_s_(tables.attr("sampled_s"), "sampled_s"),
      pair_s_(tables.attr("pair_s"), "pair_s"),
      context_s_(tables.attr("context_s"), "context_s"),
      row_(nodes.attr("row"), "row"),
      kv_tokens_(nodes.attr("kv_tokens"), "kv_tokens"),
      kv_companions_(nodes.attr("kv_companions"), "kv_companions"),
      kv_seen_(nodes.attr("kv_seen"), "kv_seen"),
      kv_state_(nodes.attr("kv_state"), "kv_state"),
      prefill_ratio_(nodes.attr("prefill_ratio"), "prefill_ratio"),
      decode_ratio_(nodes.attr("decode_ratio"), "decode_ratio"),
      pull_fixed_s_(nodes.attr("pull_fixed_s"), "pull_fixed_s"),
      pull_token_s_(nodes.attr("pull_token_s"), "pull_token_s"),
      tier_fixed_s_(nodes.attr("tier_fixed_s"), "tier_fixed_s"),
      tier_token_s_(nodes.attr("tier_token_s"), "tier_token_s"),
      others_(loads.attr("others"), "others"),
      others_context_(loads.attr("others_context"), "others_context"),
      yielding_(yielding, "yielding"),
      requests_(calendar.attr("requests"), "requests", 2),
      tokens_(calendar.attr("tokens"), "tokens", 2),
      present_(nb::cast<int64_t>(calendar.attr("present"))),
      bucket_s_(nb::cast<double>(calendar.attr("bucket_s"))),
      now_s_(now_s),
      newcomer_(newcomer) {
    check_tables();
    check_slots();
    check_calendar();
    int64_t companions = 0;
    for (int64_t slot = 0; slot < num_slots(); ++slot) companions |= kv_companions_[slot];
    has_windows_ = companions != 0;
}

void FleetView::check_tables() const {
    const int64_t num_rows = seconds_.size(0);
    rising_.expect_size(num_rows, "rising");
    rising_.expect_size(seconds_.size(1), "rising", 1);
    for (const Ints* column : {&num_tabulated_, &token_budget_, &max_batch_}) {
        column->expect_size(num_rows, "counts by row");
    }
    for (const Floats* column : {&full_step_s_, &sampled_s_, &pair_s_, &context_s_}) {
        column->expect_size(num_rows, "seconds by row");
    }
}

void FleetView::check_slots() const {
    for (const Ints* column : {&kv_tokens_, &kv_companions_, &kv_seen_, &kv_state_, &others_,
             &others_context_, &yielding_}) {
        column->expect_size(num_slots(), "counts by slot");
    }
    for (const Floats* column : {&prefill_ratio_, &decode_ratio_, &pull_fixed_s_, &pull_token_s_,
             &tier_fixed_s_, &tier_token_s_}) {
        column->expect_size(num_slots(), "seconds by slot");
    }
    const int64_t last = seconds_.size(1) - 1;
    for (int64_t slot = 0; slot < num_slots(); ++slot) {
        const int64_t row = row_[slot];
        // Everything that is looked up below is within the budget or the largest batch.
        if (row < 0 || row >= seconds_.size(0) || num_tabulated_[row] > last ||
            token_budget_[row] < 1 || token_budget_[row] > num_tabulated_[row] ||
            max_batch_[row] < 1 || max_batch_[row] > num_tabulated_[row]) {
            raise_value_error("row[" + std::to_string(slot) + "]", "one that is tabulated",
                std::to_string(row));
        }
    }
}

void FleetView::check_calendar() const {
    for (const Ints* column : {&requests_, &tokens_}) {
        column->expect_size(num_slots(), "the calendar", 1);
        column->expect_size(requests_.size(), "the calendar");
    }
    if (num_buckets() < 1 || present_ < 0 || !(bucket_s_ > 0)) {
        raise_value_error("the calendar", "buckets of some seconds, counted from 0",
            std::to_string(num_buckets()) + " of " + std::to_string(bucket_s_) + " s, from " +
                std::to_string(present_));
    }
}

}  // namespace pdserve::routing
