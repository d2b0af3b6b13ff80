// Finds a thread that stands still though it has something to do.
//
// Who looks is a thread that never needs Python's interpreter: one that stands still may hold its
// lock, and then no Python code can tell anybody. Only time in which this process ran is counted:
// in ticks that came in time. So neither a process that was stopped nor a machine that was too busy
// to tick makes a thread seem still; nor does one that is ready to run, and is given no core.
#pragma once

#include <sys/types.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace pdserve {

// For how long a thread has stood still.
class StillTime {
public:
    struct Look {
        double ran_s;  // processor time that the thread has used
        uint64_t num_done;  // of what it had to do
        bool may_stand;  // it has nothing to do, or waits for a core
    };

    // Throws std::invalid_argument: `tick_s` is not positive.
    explicit StillTime(double tick_s);

    // Looks once, after about `tick_s`; returns seconds.
    double look(double now_s, const Look& seen);

private:
    double tick_s_;
    double due_s_ = 0.0;
    double still_s_ = 0.0;
    Look last_{-1.0, 0, true};
};

class Watchdog {
public:
    // What ends the process if the thread stands still for longer than `limit_s`.
    struct End {
        double limit_s;
        int exit_code;
        int signum;  // is raised before, so that a handler may write where threads are; 0: none
    };

    // Of a thread of this process, which outlives `stop`, and the clock of its processor time.
    Watchdog(pid_t thread, clockid_t clock) : thread_(thread), clock_(clock) {}
    ~Watchdog() { stop(); }
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // The thread has one thing more to do, and one less.
    void expect() { ++num_expected_; }
    void done() { ++num_done_; }

    // Looks from now on, every `tick_s`, which is positive. Throws std::logic_error: it does already.
    void start(double tick_s, const End& end);
    void stop();
    double still_s() const { return still_s_; }

private:
    void run(StillTime still, double tick_s, End end);
    StillTime::Look look() const;
    [[noreturn]] static void end_process(double still_s, const End& end);

    const pid_t thread_;
    const clockid_t clock_;
    std::atomic<uint64_t> num_expected_{0}, num_done_{0};
    std::atomic<double> still_s_{0.0};

    std::mutex mutex_;  // guards is_over_
    std::condition_variable over_;
    bool is_over_ = false;
    std::thread looks_;
};

}  // namespace pdserve
