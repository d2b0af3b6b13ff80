// Which way of copying is the fastest on this machine, by the size of the span.
#pragma once

#include <array>
#include <cstddef>

#include "copy_ways.h"

namespace pdserve {

// Ways are chosen for spans from each of these sizes up to the next. Shorter ones are copied through
// the caches: they would leave too many half-filled write-combining buffers.
inline constexpr std::array<size_t, 3> kSpanBytes{8 << 10, 16 << 10, 64 << 10};

// Of copies of one kind: without a sum, or with one.
struct WayRates {
    // Bytes per second of each way, for each size.
    std::array<std::array<double, kCopyWays.size()>, kSpanBytes.size()> rates;
    std::array<const CopyWay*, kSpanBytes.size()> fastest;

    const CopyWay& of(size_t nbytes) const {
        size_t chosen = kSpanBytes.size();
        while (chosen > 0 && nbytes < kSpanBytes[chosen - 1]) --chosen;
        return chosen == 0 ? kCopyWays[0] : *fastest[chosen - 1];
    }
};

struct CopyChoice {
    WayRates plain, summed;

    Copy of(size_t nbytes) const { return plain.of(nbytes).copy; }
    SummedCopy summed_of(size_t nbytes) const { return summed.of(nbytes).summed; }
};

// Measured by the first caller, in a few milliseconds; kept for the life of the process.
const CopyChoice& copy_choice();

}  // namespace pdserve
