// Norm and rotation (RoPE) of one head.
#pragma once

#include "../../../isa/simd.h"

namespace pdserve::attention {
namespace {

// 1 / root mean square of a head, or of several.
template <class T>
PDSERVE_INLINE float norm_of(const T* head, int64_t head_dim, float eps) {
    FloatLanes squares = {};
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
        const FloatLanes x = load(head + d);
        squares = multiply_add(squares, x, x);
    }
    float sum = sum_of(squares);
    for (; d < head_dim; ++d) sum += to_float(head[d]) * to_float(head[d]);
    return 1.0f / __builtin_sqrtf(sum / static_cast<float>(head_dim) + eps);
}

// Rotates each pair (head[i], head[i + half]); `target` may be `head`.
template <bool kHasNorm, class From, class T>
PDSERVE_INLINE void rotate_head(const From* head, int head_dim, const float* norm, float factor,
    const float* cosines, T* target) {
    const int half = head_dim / 2;
    const float* sines = cosines + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        FloatLanes a = load(head + i), b = load(head + half + i);
        if constexpr (kHasNorm) {
            a = a * splat(factor) * load(norm + i);
            b = b * splat(factor) * load(norm + half + i);
        }
        const FloatLanes cosine = load(cosines + i), sine = load(sines + i);
        store(target + i, a * cosine - b * sine);
        store(target + half + i, b * cosine + a * sine);
    }
    for (; i < half; ++i) {
        float a = to_float(head[i]), b = to_float(head[half + i]);
        if constexpr (kHasNorm) {
            a = a * factor * norm[i];
            b = b * factor * norm[half + i];
        }
        assign(target[i], a * cosines[i] - b * sines[i]);
        assign(target[half + i], b * cosines[i] + a * sines[i]);
    }
}

}  // namespace
}  // namespace pdserve::attention
