// The rows for which the last layer computes more than keys and values, and the purpose of each.
#pragma once

#include <cstdint>
#include <vector>

#include "../../attention/layer.h"

namespace pdserve::decoder {

// The rows of a step, ascending, whose logits or final states are needed, or both.
class KeptRows {
public:
    // Borrows `sampled` if no states are needed, so the usual step costs nothing here.
    KeptRows(attention::RowChoice sampled, attention::RowChoice states);

    // All kept rows, as rows of the step.
    attention::RowChoice all() const { return all_; }

    // Indices into all() of the rows whose states are needed.
    const std::vector<int64_t>& states() const { return states_; }

    // Whether rows other than the sampled ones may be kept; if so, the indices of the sampled ones
    // in all().
    bool is_mixed() const { return !states_.empty(); }
    attention::RowChoice sampled() const;

private:
    attention::RowChoice all_;
    std::vector<int64_t> merged_;  // what all_ is of, where states are wanted
    std::vector<int64_t> sampled_;
    std::vector<int64_t> states_;
};

}  // namespace pdserve::decoder
