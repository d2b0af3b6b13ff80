// Rows of x in the form that the products read, where they are not in it already.
#pragma once

#include <cstdint>

#include "../simd.h"

namespace pdserve::linear {
namespace {

// Rows of float32, the last pair completed by a zero.
template <class T>
void widen_rows(
    const void* source, int64_t source_stride, int64_t num_rows, int64_t num_in, void* target) {
    const int64_t padded = (num_in + 1) / 2 * 2;
    for (int64_t r = 0; r < num_rows; ++r) {
        const T* from = static_cast<const T*>(source) + r * source_stride;
        float* to = static_cast<float*>(target) + r * padded;
        int64_t i = 0;
        for (; i + kLanes <= num_in; i += kLanes) store(to + i, load(from + i));
        for (; i < num_in; ++i) to[i] = to_float(from[i]);
        if (i < padded) to[i] = 0.0f;
    }
}

// Rows of bfloat16, the last pair completed by a zero.
[[maybe_unused]] void pad_rows(
    const void* source, int64_t source_stride, int64_t num_rows, int64_t num_in, void* target) {
    const int64_t padded = (num_in + 1) / 2 * 2;
    for (int64_t r = 0; r < num_rows; ++r) {
        const BFloat16* from = static_cast<const BFloat16*>(source) + r * source_stride;
        BFloat16* to = static_cast<BFloat16*>(target) + r * padded;
        __builtin_memcpy(to, from, num_in * sizeof(BFloat16));
        if (num_in < padded) to[num_in] = {0};
    }
}

}  // namespace
}  // namespace pdserve::linear
