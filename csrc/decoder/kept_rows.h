// The rows that the last layer goes on with behind its keys and values, and what each is for.
#pragma once

#include <cstdint>
#include <vector>

#include "../attention/layer.h"

namespace pdserve::decoder {

// Ascending rows of a step that are wanted for logits, for their final states, or for both.
class KeptRows {
public:
    // Borrows `sampled` where no states are wanted: the usual step costs nothing here.
    KeptRows(attention::RowChoice sampled, attention::RowChoice states);

    // Either kind, of the step's rows.
    attention::RowChoice all() const { return all_; }

    // Places among all() of those whose states are wanted.
    const std::vector<int64_t>& states() const { return states_; }

    // Whether there may be others than the sampled ones; and if so, their places among all().
    bool is_mixed() const { return !states_.empty(); }
    attention::RowChoice sampled() const;

private:
    attention::RowChoice all_;
    std::vector<int64_t> merged_;  // what all_ is of, where states are wanted
    std::vector<int64_t> sampled_;
    std::vector<int64_t> states_;
};

}  // namespace pdserve::decoder
