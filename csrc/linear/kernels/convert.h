// Converts rows of x to the form that the products read.
#pragma once

#include <cstdint>

#include "../../isa/simd.h"
#include "kernel.h"

namespace pdserve::linear {
namespace {

// To float32, padded with zeros to a whole unit.
template <class T>
void widen_rows(const Rows& rows, int64_t num_in, int64_t padded, void* target) {
    for (int64_t r = 0; r < rows.count; ++r) {
        const T* from = static_cast<const T*>(rows.start) + r * rows.stride;
        float* to = static_cast<float*>(target) + r * padded;
        int64_t i = 0;
        for (; i + kLanes <= num_in; i += kLanes) store(to + i, load(from + i));
        for (; i < num_in; ++i) to[i] = to_float(from[i]);
        for (; i < padded; ++i) to[i] = 0.0f;
    }
}

// To bfloat16, padded with zeros to a whole unit.
[[maybe_unused]] void pad_rows(
    const Rows& rows, int64_t num_in, int64_t padded, void* target) {
    for (int64_t r = 0; r < rows.count; ++r) {
        const BFloat16* from = static_cast<const BFloat16*>(rows.start) + r * rows.stride;
        BFloat16* to = static_cast<BFloat16*>(target) + r * padded;
        __builtin_memcpy(to, from, num_in * sizeof(BFloat16));
        for (int64_t i = num_in; i < padded; ++i) to[i] = {0};
    }
}

}  // namespace
}  // namespace pdserve::linear
