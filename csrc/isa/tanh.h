// tanh, and what keeps scores within a cap. Internal linkage; see element.h for why.
#pragma once

#include "simd.h"

namespace pdserve {
namespace {

// To a few units in the last place; NaN stays NaN. Near 0, 1 - exp(-2|x|) would have lost most of
// its digits, so there it is a series.
PDSERVE_INLINE FloatLanes tanh_of(FloatLanes x) {
    const FloatLanes magnitude = x < splat(0.0f) ? -x : x;
    const FloatLanes decay = exp2_of_nonpositive(magnitude * splat(-2.88539008177792681f));
    const FloatLanes far = (splat(1.0f) - decay) / (splat(1.0f) + decay);
    const FloatLanes square = magnitude * magnitude;
    FloatLanes p = splat(-17.0f / 315.0f);
    p = multiply_add(splat(2.0f / 15.0f), p, square);
    p = multiply_add(splat(-1.0f / 3.0f), p, square);
    const FloatLanes near = multiply_add(magnitude, magnitude * square, p);
    const FloatLanes found = magnitude < splat(0.125f) ? near : far;
    return x < splat(0.0f) ? -found : found;
}

// x becomes cap * tanh(x * scale / cap) / scale: the cap is of scaled numbers.
class SoftCap {
public:
    explicit SoftCap(float cap, float scale = 1.0f)
        : inner_(splat(scale / cap)), outer_(splat(cap / scale)) {}

    PDSERVE_INLINE void apply(float* x, int64_t count) const {
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) store(x + i, capped(load(x + i)));
        if (i == count) return;
        float rest[kLanes] = {};
        __builtin_memcpy(rest, x + i, (count - i) * sizeof(float));
        store(rest, capped(load(rest)));
        __builtin_memcpy(x + i, rest, (count - i) * sizeof(float));
    }

private:
    PDSERVE_INLINE FloatLanes capped(FloatLanes x) const { return tanh_of(x * inner_) * outer_; }

    const FloatLanes inner_;
    const FloatLanes outer_;
};

}  // namespace
}  // namespace pdserve
