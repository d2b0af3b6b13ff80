// Numbers in memory that the ranks of a node share, and waiting for them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../threads/spin.h"
#include "futex.h"

namespace pdserve::ranks {

// A rank has ended or failed, or has not come in time. The others cannot compute any more.
struct RanksLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Zeroed memory is each of these in its first state.
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Whether a rank is lost: whoever waits, now or later, throws RanksLost then.
class Loss {
public:
    void declare() { is_declared_.store(1); }
    bool is_declared() const { return is_declared_.load(std::memory_order_relaxed) != 0; }
    void check() const {
        if (is_declared()) throw RanksLost("another rank of this node has ended or failed");
    }

private:
    std::atomic<uint32_t> is_declared_{0};
};

// A number on which others sleep until it changes.
class Counter {
public:
    uint32_t get() const { return value_.load(std::memory_order_acquire); }

    void set(uint32_t number) {
        value_.store(number);  // sequentially consistent with num_sleepers_
        if (num_sleepers_.load() > 0) futex_wake_all(value_);
    }

    // Waits while the number is `old`, for as long as it takes. Throws RanksLost.
    void await_change(uint32_t old, const Loss& loss) {
        while (!changes(old, loss, kLongestWait)) {}
    }

    // The same while others compute. Whoever has not come within a minute is lost.
    void await_rank(uint32_t old, Loss& loss) {
        if (changes(old, loss, kLongestWait)) return;
        loss.declare();
        throw RanksLost("a rank of this node has not come within "
            + std::to_string(kLongestWait.count()) + " s");
    }

private:
    using Clock = std::chrono::steady_clock;

    // About as long as ranks with equal work are apart. A rank that has no core of its own is later,
    // and needs that of one that sleeps.
    static constexpr std::chrono::microseconds kSpin{100};
    static constexpr std::chrono::milliseconds kLook{50};  // a sleeper looks whether one is lost
    static constexpr std::chrono::seconds kLongestWait{60};

    bool changes(uint32_t old, const Loss& loss, Clock::duration most) {
        const auto end = Clock::now() + most;
        const auto happened = [&] { return get() != old || loss.is_declared(); };
        if (!spin_until(happened, kSpin)) {
            num_sleepers_.fetch_add(1);
            while (!happened() && Clock::now() < end) futex_wait(value_, old, kLook);
            num_sleepers_.fetch_sub(1);
        }
        loss.check();
        return get() != old;
    }

    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> num_sleepers_{0};
};

// Where ranks wait until all of them are there.
class Meeting {
public:
    // Throws RanksLost.
    void meet(int num_ranks, Loss& loss) {
        const uint32_t meeting = meetings_.get();
        if (num_arrived_.fetch_add(1) + 1 == static_cast<uint32_t>(num_ranks)) {
            num_arrived_.store(0);
            meetings_.set(meeting + 1);
        } else {
            meetings_.await_rank(meeting, loss);
        }
        loss.check();
    }

private:
    alignas(64) std::atomic<uint32_t> num_arrived_{0};
    alignas(64) Counter meetings_;
};

}  // namespace pdserve::ranks
