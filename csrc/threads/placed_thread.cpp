#include "placed_thread.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>

#include "spin.h"

namespace pdserve {

namespace {

// Long enough for the clock of a thread that runs to advance.
constexpr std::chrono::microseconds kLook{5};

int64_t nanoseconds(clockid_t clock) {
    timespec time{};
    return clock_gettime(clock, &time) == 0 ? time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec
                                            : -1;
}

}  // namespace

void PlacedThread::bind() {
    const pid_t thread = gettid();
    if (thread == thread_) return;
    const std::lock_guard lock(mutex_);
    clockid_t clock{};
    pthread_getcpuclockid(pthread_self(), &clock);
    clock_ = clock;
    thread_ = thread;
    CPU_ZERO(&cores_);
    CPU_ZERO(&last_cores_);
    avoided_core_ = -1;
}

bool PlacedThread::stands_still() const {
    const int64_t before = nanoseconds(clock_);
    spin_until([] { return false; }, kLook);
    return before >= 0 && nanoseconds(clock_) == before;
}

bool PlacedThread::move_here() {
    const int core = sched_getcpu();
    if (core < 0 || !learn_cores() || !CPU_ISSET(core, &cores_)) return false;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(core, &here);
    return set_cores(here);
}

void PlacedThread::return_core() {
    if (!has_loan_) return;
    const std::lock_guard lock(mutex_);
    if (has_loan_) end_loan();
}

void PlacedThread::step_away(int core) {
    const std::lock_guard lock(mutex_);
    if (!learn_cores() || CPU_COUNT(&cores_) < 2) return;
    avoided_core_ = core;  // after learn_cores, which may forget the one before
    end_loan();
}

void PlacedThread::end_loan() {
    learn_cores();
    cpu_set_t cores = cores_;
    if (avoided_core_ >= 0 && CPU_COUNT(&cores) > 1) CPU_CLR(avoided_core_, &cores);
    if (CPU_COUNT(&cores) > 0) set_cores(cores);
    has_loan_ = false;
}

// Whether it is known which cores the thread may use. If they are others than last time, somebody
// else has decided anew.
bool PlacedThread::learn_cores() {
    cpu_set_t now;
    if (sched_getaffinity(thread_, sizeof(now), &now) != 0) return false;
    if (CPU_EQUAL(&now, &last_cores_)) return true;
    cores_ = last_cores_ = now;
    avoided_core_ = -1;
    return true;
}

bool PlacedThread::set_cores(const cpu_set_t& cores) {
    last_cores_ = cores;
    return sched_setaffinity(thread_, sizeof(cores), &cores) == 0;
}

}  // namespace pdserve
