// A thread that others wait for, and on which core it is.
//
// On a core that another process uses too, a thread stands still for some milliseconds at a time,
// whatever it holds. Linux does not move it to a core that has just become idle, because its data
// may still be in the caches where it was. So whoever waits for it lends it its own core and sleeps.
// Nor does Linux look for an idle core for a thread that wakes up on a busy machine. So a thread
// that finds itself on the core of another one, with which it should share work, steps away.
#pragma once

#include <sched.h>
#include <sys/types.h>
#include <time.h>

#include <atomic>
#include <mutex>

namespace pdserve {

// One thread at a time.
class PlacedThread {
public:
    // Called by the thread itself, while nobody waits for it. It must not end while it is awaited.
    void bind();

    // Called by another thread, which is about to sleep: if this one is awaited but stands still,
    // it goes on on the caller's core, if it may use that. `is_awaited` is called again after the
    // move, which is undone if nobody waits any longer.
    template <class IsAwaited>
    void lend_core(const IsAwaited& is_awaited) {
        if (!is_awaited() || !stands_still()) return;
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock() || has_loan_) return;
        has_loan_ = true;
        if (!move_here() || !is_awaited()) end_loan();
    }

    // Called by the thread itself, once nobody waits for it: it may use all its cores again.
    void return_core();

    // Called by the thread itself: leaves this core, unless it may use no other one.
    void step_away(int core);

private:
    bool stands_still() const;
    bool move_here();
    void end_loan();
    bool learn_cores();
    bool set_cores(const cpu_set_t& cores);

    std::atomic<pid_t> thread_{0};
    std::atomic<clockid_t> clock_{0};  // of its processor time

    std::mutex mutex_;  // guards what follows; has_loan_ may be read without it
    std::atomic<bool> has_loan_{false};
    cpu_set_t cores_{};       // that it may use, as somebody else has set them
    cpu_set_t last_cores_{};  // as last set here or found; empty: never
    int avoided_core_ = -1;
};

}  // namespace pdserve
