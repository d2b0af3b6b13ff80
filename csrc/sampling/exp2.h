// 2**x for the weights of sampling, with the same rounding in every build and in torch.
//
// Compiled without fused multiply-adds (CMakeLists.txt), so that each operation is rounded
// separately, as in torch. pdserve/engine/sampling/weights.py does the same, line by line.
#pragma once

#include "../isa/simd.h"

namespace pdserve::sampling {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

// For x <= 0. Accurate to about one unit in the last place; exactly 1 at 0; 2**-126 for all x below
// -126.
PDSERVE_INLINE FloatLanes exp2_rounded_alike(FloatLanes x) {
    const FloatLanes lowest = splat(-126.0f);
    const FloatLanes clamped = x < lowest ? lowest : x;
    // Adding 1.5 * 2**23 rounds to an integer, which then stands in the low bits.
    const FloatLanes shifted = clamped + splat(12582912.0f);
    const FloatLanes fraction = clamped - (shifted - splat(12582912.0f));  // in [-0.5, 0.5]
    const IntLanes exponent = (IntLanes)shifted + 127;
    const FloatLanes power = (FloatLanes)(exponent << 23);
    FloatLanes p = splat(1.535336188319500e-4f);
    p = p * fraction + splat(1.339887440266574e-3f);
    p = p * fraction + splat(9.618437357674640e-3f);
    p = p * fraction + splat(5.550332471162809e-2f);
    p = p * fraction + splat(2.402264791363012e-1f);
    p = p * fraction + splat(6.931472028550421e-1f);
    p = p * fraction + splat(1.0f);
    return p * power;
}

// Rounds a number in [0, 1] to a multiple of 2**-34. Numbers from 2**-11 on are multiples already.
PDSERVE_INLINE FloatLanes to_units(FloatLanes x) {
    const FloatLanes limit = splat(0x1p-11f);
    const FloatLanes rounded = (x + limit) - limit;
    return x < limit ? rounded : x;
}

}  // namespace
}  // namespace pdserve::sampling
