// The tensor-parallel ranks of a stage: they compute its layers together, each with its share of the
// heads, and add up their parts of a result.
//
//     | Meeting | num_ranks x 2 slots |
//
// A sum has the same bits in every rank and every run: it is taken in the order of the ranks. It
// costs one meeting, since slots are used in turns: whoever writes a slot again has met, since it
// was last written, all those that read it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "counter.h"
#include "slot.h"

namespace pdserve::ranks {

class TensorRanks {
public:
    static size_t memory_bytes(int num_ranks);

    TensorRanks(char* memory, int rank, int num_ranks, Loss& loss);

    bool is_first() const { return rank_ == 0; }
    bool is_alone() const { return num_ranks_ == 1; }
    int count() const { return num_ranks_; }

    // Waits for all ranks. Throws RanksLost.
    void meet();

    // This rank's part of the next sum.
    float* part() { return slot(rank_); }

    // Meets, and adds the parts of all ranks to `target` [num_rows, width], or replaces it by them.
    void sum(float* target, int64_t num_rows, int64_t width, bool adds);

private:
    float* slot(int rank) const { return slot_at(slots_, 2 * rank + turn_); }

    Meeting& meeting_;
    char* const slots_;
    const int rank_;
    const int num_ranks_;
    Loss& loss_;
    int turn_ = 0;  // which of its two slots a rank writes next
};

}  // namespace pdserve::ranks
