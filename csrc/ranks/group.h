// The tensor-parallel ranks of one node on one host: processes that compute a step together. They
// meet in memory that all of them have mapped, and add up their parts of a result there.
//
//     | Control | num_ranks x 2 slots of kSlotBytes |
//
// A sum has the same bits in every rank and every run: it is taken in the order of the ranks. It
// costs one meeting, since slots are used in turns: whoever writes a slot again has met, since it
// was last written, all those that read it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace pdserve::ranks {

// A rank has ended or failed, or has not come in time. The others cannot compute any more.
struct RanksLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Group {
public:
    static constexpr size_t kSlotBytes = 4 << 20;

    static size_t memory_bytes(int num_ranks);

    // `memory`: memory_bytes(num_ranks), zeroed once, the same in all ranks, and outlives this.
    Group(void* memory, int rank, int num_ranks);

    int rank() const { return rank_; }

    // Says that this rank can take part in steps, and waits until all can; false if that took longer.
    void say_ready();
    bool wait_ready(std::chrono::microseconds most);

    // Rank 0 begins a step. What it has written before is then visible to all.
    void begin_step();

    // The others wait for the step after `last`, for as long as it takes. Throws RanksLost.
    uint32_t wait_step(uint32_t last);

    // Makes every rank that waits here, now or later, throw RanksLost.
    void give_up();
    bool is_lost() const;

    // Waits for all ranks. Throws RanksLost.
    void meet();

    // How many rows of `width` floats fit into a slot; at least 1.
    int64_t rows_at_once(int64_t width) const;

    // This rank's part of the next sum.
    float* part() { return slot(rank_); }

    // Meets, and adds the parts of all ranks to `target` [num_rows, width], or replaces it by them.
    void sum(float* target, int64_t num_rows, int64_t width, bool adds);

private:
    struct Control;

    float* slot(int rank) const;
    void check() const;

    Control& control_;
    char* slots_;
    const int rank_;
    const int num_ranks_;
    int turn_ = 0;  // which of its two slots a rank writes next
};

}  // namespace pdserve::ranks
