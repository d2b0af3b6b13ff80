// Sleeping until a number in memory shared between processes changes.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pdserve::ranks {

// Returns when the number is not `value`, when woken, after `most`, or for no reason.
inline void futex_wait(
    std::atomic<uint32_t>& number, uint32_t value, std::chrono::milliseconds most) {
    const timespec time{.tv_sec = most.count() / 1000, .tv_nsec = most.count() % 1000 * 1'000'000};
    syscall(SYS_futex, &number, FUTEX_WAIT, value, &time, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& number) {
    syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace pdserve::ranks
