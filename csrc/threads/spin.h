// Waiting without giving up the core.
#pragma once

#include <chrono>

namespace pdserve {

// Spins until `happened` returns true; false if it did not within `most`.
template <class Happened>
bool spin_until(const Happened& happened, std::chrono::microseconds most) {
    constexpr int kLooksPerClock = 32;
    if (happened()) return true;
    const auto end = std::chrono::steady_clock::now() + most;
    do {
        for (int i = 0; i < kLooksPerClock; ++i) {
            if (happened()) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
    } while (std::chrono::steady_clock::now() < end);
    return happened();
}

}  // namespace pdserve
