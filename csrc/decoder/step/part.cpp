#include "part.h"

#include <algorithm>

namespace pdserve::decoder {

namespace {

// The chosen rows among [first, end), counted from `first`; how many are before them.
int64_t choose(const attention::RowChoice& choice, int64_t first, int64_t end,
    std::vector<int64_t>& rows) {
    const int64_t* const last = choice.rows + choice.num_rows;
    const int64_t* const from = std::lower_bound(choice.rows, last, first);
    for (const int64_t* row = from; row != last && *row < end; ++row) rows.push_back(*row - first);
    return from - choice.rows;
}

attention::RowChoice choice_of(const std::vector<int64_t>& rows) {
    return {rows.data(), static_cast<int64_t>(rows.size())};
}

}  // namespace

Part::Part(const Inputs& whole, int64_t first, int64_t end, const Sizes& sizes)
    : inputs_(whole) {
    const attention::Step& step = whole.step;
    const int32_t* const starts = step.query_start;
    const int64_t first_request =
        std::upper_bound(starts, starts + step.num_requests + 1, first) - starts - 1;
    query_start_.push_back(0);
    for (int64_t r = first_request; r < step.num_requests && starts[r] < end; ++r) {
        const int64_t last = std::min<int64_t>(starts[r + 1], end);
        query_start_.push_back(static_cast<int32_t>(last - first));
        context_lens_.push_back(
            static_cast<int32_t>(step.context_lens[r] - (starts[r + 1] - last)));
    }
    inputs_.token_ids += first;
    inputs_.positions += first;
    inputs_.step.num_tokens = end - first;
    inputs_.step.num_requests = static_cast<int64_t>(context_lens_.size());
    inputs_.step.query_start = query_start_.data();
    inputs_.step.context_lens = context_lens_.data();
    inputs_.step.block_tables += first_request * step.table_stride;
    if (whole.adapters != nullptr) {
        inputs_.adapters += first_request;
        inputs_.adapted_from += first_request;
    }
    const int64_t num_before = choose(whole.sampled, first, end, sampled_);
    inputs_.logits += num_before * sizes.vocab;
    inputs_.taps_out += num_before * whole.num_taps * sizes.hidden;
    inputs_.sampled = choice_of(sampled_);
    if (whole.states.num_rows == 0) return;
    inputs_.states_out += choose(whole.states, first, end, states_) * sizes.hidden;
    inputs_.states = choice_of(states_);
}

}  // namespace pdserve::decoder
