// 1 / (1 + exp(-x)). Internal linkage; see element.h for why.
#pragma once

#include "simd.h"

namespace pdserve {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

// To a few units in the last place; NaN stays NaN.
PDSERVE_INLINE FloatLanes sigmoid_of(FloatLanes x) {
    const FloatLanes magnitude = x < splat(0.0f) ? -x : x;
    const FloatLanes small = exp2_of_nonpositive(magnitude * splat(-kLog2E));
    return (x < splat(0.0f) ? small : splat(1.0f)) / (splat(1.0f) + small);
}

}  // namespace
}  // namespace pdserve
