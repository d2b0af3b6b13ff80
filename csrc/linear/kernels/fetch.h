// Fetches the panels after a chunk while this is multiplied.
#pragma once

#include "../../isa/simd.h"

namespace pdserve::linear {
namespace {

// As much of them as there are turns. (More at a turn would only displace what the processor
// prefetches by itself.)
class Fetch {
public:
    Fetch(const uint8_t* start, int64_t num_bytes) : at_(start), end_(start + num_bytes) {}

    PDSERVE_INLINE void take_turn() {
        if (at_ >= end_) return;
        prefetch(at_, 128);
        at_ += 128;
    }

private:
    const uint8_t* at_;
    const uint8_t* const end_;
};

}  // namespace
}  // namespace pdserve::linear
