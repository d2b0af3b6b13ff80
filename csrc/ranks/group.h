// The ranks of a node on one host: processes that compute a step together, in memory that all of
// them have mapped. Pipeline stages have some layers each; the tensor-parallel ranks of a stage have
// some heads each. Ranks are counted stage by stage.
//
//     | Control | TensorRanks of each stage | StageLink between each two |
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "counter.h"
#include "stage_link.h"
#include "tensor_ranks.h"

namespace pdserve::ranks {

class Group {
public:
    // `stages`: how many ranks each has.
    static size_t memory_bytes(const std::vector<int>& stages);

    // `memory`: memory_bytes(stages), zeroed once, the same in all ranks, and outlives this.
    Group(char* memory, int rank, const std::vector<int>& stages);

    int rank() const { return rank_; }
    bool has_stages() const { return before_ || next_; }

    // Those of this rank's stage.
    TensorRanks& tensor() { return tensor_; }

    // From the stage before and to the next; null: there is none.
    StageLink* before() { return before_ ? &*before_ : nullptr; }
    StageLink* next() { return next_ ? &*next_ : nullptr; }

    // Says that this rank can take part in steps, and waits until all can; false if that took longer.
    void say_ready();
    bool wait_ready(std::chrono::microseconds most);

    // Rank 0 begins a step. What it has written before is then visible to all.
    void begin_step();

    // The others wait for the step after `last`, for as long as it takes. Throws RanksLost.
    uint32_t wait_step(uint32_t last);

    // Later stages tell rank 0 how many layers of the model have written all keys and values of the
    // step, and it follows them from those of its own stage to the last.
    void tell_layers(int64_t num_layers);
    void follow_layers(
        int64_t first, int64_t last, const std::function<void(int64_t)>& written);

    // Waits until all ranks have computed the step. Throws RanksLost.
    void end_step();

    // Makes every rank that waits here, now or later, throw RanksLost.
    void give_up();
    bool is_lost() const;

private:
    struct Control;

    // Where a rank is.
    struct Place {
        int stage;
        int rank;         // in its stage
        size_t tensor;    // offset of its TensorRanks
        size_t links;     // offset of the first StageLink
        int num_ranks;    // of all stages
    };

    static Place place_of(int rank, const std::vector<int>& stages);
    Group(char* memory, int rank, const std::vector<int>& stages, const Place& place);

    Control& control_;
    const int rank_;
    const int num_ranks_;
    TensorRanks tensor_;
    std::optional<StageLink> before_;
    std::optional<StageLink> next_;
};

}  // namespace pdserve::ranks
