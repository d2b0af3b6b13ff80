#include "group.h"

#include <algorithm>
#include <new>
#include <string>

#include "../spin.h"
#include "../thread_pool.h"
#include "futex.h"

namespace pdserve::ranks {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// About as long as ranks with equal work are apart. A rank that has no core of its own is later, and
// needs that of one that sleeps.
constexpr microseconds kSpin{100};
constexpr milliseconds kLook{50};  // a sleeper looks whether a rank is lost, if nobody wakes it
constexpr std::chrono::seconds kLongestMeeting{60};

constexpr int64_t kElementsPerItem = 16 * 1024;

// A number that only grows; waiters sleep on it.
struct Counter {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> num_sleepers{0};

    void set(uint32_t number) {
        value.store(number);  // sequentially consistent with num_sleepers
        if (num_sleepers.load() > 0) futex_wake_all(value);
    }

    // Waits while `value` is `old`, but not after `end`.
    bool wait_while(uint32_t old, const std::atomic<uint32_t>& is_lost, Clock::time_point end) {
        const auto happened = [&] {
            return value.load(std::memory_order_acquire) != old
                || is_lost.load(std::memory_order_relaxed) != 0;
        };
        if (spin_until(happened, kSpin)) return true;
        num_sleepers.fetch_add(1);
        while (!happened() && Clock::now() < end) futex_wait(value, old, kLook);
        num_sleepers.fetch_sub(1);
        return happened();
    }
};

}  // namespace

struct Group::Control {
    alignas(64) std::atomic<uint32_t> is_lost{0};
    alignas(64) std::atomic<uint32_t> num_ready{0};
    alignas(64) std::atomic<uint32_t> num_arrived{0};
    alignas(64) Counter meetings;
    alignas(64) Counter steps;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

namespace {
constexpr size_t kControlBytes = 4096;
}

size_t Group::memory_bytes(int num_ranks) { return kControlBytes + 2 * num_ranks * kSlotBytes; }

// Zeroed memory is a Control in its first state.
Group::Group(void* memory, int rank, int num_ranks)
    : control_(*static_cast<Control*>(memory)),
      slots_(static_cast<char*>(memory) + kControlBytes),
      rank_(rank),
      num_ranks_(num_ranks) {
    static_assert(sizeof(Control) <= kControlBytes);
}

void Group::say_ready() { control_.num_ready.fetch_add(1); }

bool Group::wait_ready(microseconds most) {
    const auto end = Clock::now() + most;
    const auto all = static_cast<uint32_t>(num_ranks_);
    for (;;) {
        check();
        const uint32_t now = control_.num_ready.load();
        if (now >= all) return true;
        if (Clock::now() >= end) return false;
        futex_wait(control_.num_ready, now, milliseconds(5));
    }
}

void Group::begin_step() { control_.steps.set(control_.steps.value.load() + 1); }

uint32_t Group::wait_step(uint32_t last) {
    while (!control_.steps.wait_while(last, control_.is_lost, Clock::now() + kLongestMeeting)) {}
    check();
    return control_.steps.value.load();
}

void Group::give_up() {
    control_.is_lost.store(1);
    futex_wake_all(control_.meetings.value);
    futex_wake_all(control_.steps.value);
}

bool Group::is_lost() const { return control_.is_lost.load() != 0; }

void Group::check() const {
    if (is_lost()) throw RanksLost("another rank of this node has ended or failed");
}

void Group::meet() {
    const uint32_t meeting = control_.meetings.value.load();
    if (control_.num_arrived.fetch_add(1) + 1 == static_cast<uint32_t>(num_ranks_)) {
        control_.num_arrived.store(0);
        control_.meetings.set(meeting + 1);
    } else if (!control_.meetings.wait_while(
                   meeting, control_.is_lost, Clock::now() + kLongestMeeting)) {
        give_up();
        throw RanksLost("a rank of this node has not come to a meeting within "
            + std::to_string(kLongestMeeting.count()) + " s");
    }
    check();
}

int64_t Group::rows_at_once(int64_t width) const {
    return static_cast<int64_t>(kSlotBytes / sizeof(float)) / width;
}

float* Group::slot(int rank) const {
    return reinterpret_cast<float*>(slots_ + (2 * rank + turn_) * kSlotBytes);
}

void Group::sum(float* target, int64_t num_rows, int64_t width, bool adds) {
    meet();
    const int64_t num_elements = num_rows * width;
    const int64_t num_items = (num_elements + kElementsPerItem - 1) / kElementsPerItem;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t first = item * kElementsPerItem;
        const int64_t count = std::min(num_elements - first, kElementsPerItem);
        float* to = target + first;
        if (!adds) std::fill_n(to, count, 0.0f);
        for (int rank = 0; rank < num_ranks_; ++rank) {
            const float* from = slot(rank) + first;
            for (int64_t i = 0; i < count; ++i) to[i] += from[i];
        }
    });
    turn_ = 1 - turn_;
}

}  // namespace pdserve::ranks
