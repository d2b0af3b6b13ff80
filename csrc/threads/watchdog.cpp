#include "watchdog.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>

namespace pdserve {

namespace {

constexpr unsigned kTellsWithin = 2;  // seconds, if nobody reads what is told

double seconds(clockid_t clock) {
    timespec time{};
    if (clock_gettime(clock, &time) != 0) return -1.0;
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Whether a thread of this process runs, or would if it were given a core.
bool is_ready(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string stat;
    std::getline(file, stat);
    const size_t name_ends = stat.rfind(')');
    return name_ends != std::string::npos && stat.compare(name_ends, 3, ") R") == 0;
}

}  // namespace

StillTime::StillTime(double tick_s) : tick_s_(tick_s) {
    if (!(tick_s > 0)) throw std::invalid_argument("tick_s must be > 0");
}

double StillTime::look(double now_s, const Look& seen) {
    const bool in_time = now_s < due_s_ + tick_s_;
    due_s_ = now_s + tick_s_;
    if (seen.may_stand || seen.ran_s != last_.ran_s || seen.num_done != last_.num_done) {
        still_s_ = 0.0;
    } else if (in_time) {
        still_s_ += tick_s_;
    }
    last_ = seen;
    return still_s_;
}

void Watchdog::start(double tick_s, const End& end) {
    if (looks_.joinable()) throw std::logic_error("it looks already");
    is_over_ = false;
    looks_ = std::thread(&Watchdog::run, this, StillTime(tick_s), tick_s, end);
}

void Watchdog::stop() {
    if (!looks_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        is_over_ = true;
    }
    over_.notify_one();
    looks_.join();
}

void Watchdog::run(StillTime still, double tick_s, End end) {
    pthread_setname_np(pthread_self(), "watchdog");
    const std::chrono::duration<double> tick(tick_s);
    std::unique_lock lock(mutex_);
    while (!over_.wait_for(lock, tick, [this] { return is_over_; })) {
        still_s_ = still.look(seconds(CLOCK_MONOTONIC), look());
        if (still_s_ > end.limit_s) end_process(still_s_, end);
    }
}

StillTime::Look Watchdog::look() const {
    // In this order: what comes in between makes it seem busy, and is seen by the next look.
    const uint64_t num_done = num_done_;
    const bool has_work = num_expected_ != num_done;
    const double ran_s = seconds(clock_);
    return {ran_s, num_done, !has_work || ran_s < 0 || is_ready(thread_)};
}

void Watchdog::end_process(double still_s, const End& end) {
    // If the log is not read either, the alarm ends the process.
    signal(SIGALRM, SIG_DFL);
    alarm(kTellsWithin);
    char text[200];
    const int size = std::snprintf(text, sizeof(text),
        "pdserve node: error: engine_stuck: its thread has not run for %.1f s, though it has "
        "work to do, and Python could not say so\n",
        still_s);
    if (end.signum != 0) raise(end.signum);
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, static_cast<size_t>(size));
    _exit(end.exit_code);
}

}  // namespace pdserve
