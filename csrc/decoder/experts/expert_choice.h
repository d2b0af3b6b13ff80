// Which experts the rows of a layer have, and the rows of each expert, side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "../model.h"

namespace pdserve::decoder {

class ExpertChoice {
public:
    // One of the experts of a row.
    struct Chosen {
        int32_t expert;
        float weight;
        int64_t place;  // of the row among those of all experts
    };

    // Chooses by scores [num_rows, num_experts]; of equals the first one. A row's experts and
    // weights depend on its scores alone, also if these are not numbers.
    void choose(const Experts& experts, const float* scores, int64_t num_rows);

    // Those of a row, num_chosen of them, in ascending order.
    const Chosen* of(int64_t row) const { return chosen_.data() + row * num_chosen_; }
    int64_t num_chosen() const { return num_chosen_; }

    // The rows of expert e have the places starts()[e] to starts()[e + 1], in ascending order.
    const std::vector<int64_t>& starts() const { return starts_; }

private:
    int64_t num_chosen_ = 0;
    std::vector<Chosen> chosen_;
    std::vector<int64_t> starts_;
    std::vector<int64_t> next_;  // place of the next row of each expert
};

}  // namespace pdserve::decoder
