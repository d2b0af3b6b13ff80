// Pieces of shared memory through which rows of floats go from rank to rank.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pdserve::ranks {

constexpr size_t kSlotBytes = 4 << 20;
constexpr size_t kControlBytes = 4096;  // before slots: what says who may use them

inline float* slot_at(char* slots, int64_t index) {
    return reinterpret_cast<float*>(slots + index * kSlotBytes);
}

// Products of so many rows are nearly as fast as those of more, so stages take turns that often.
constexpr int64_t kRowsOfPart = 128;

// How many rows of `width` floats fit into a slot; at least 1.
inline int64_t rows_at_once(int64_t width) {
    return static_cast<int64_t>(kSlotBytes / sizeof(float)) / width;
}

// How many rows a part of a step has; the last part may have fewer.
inline int64_t rows_of_part(int64_t width) { return std::min(kRowsOfPart, rows_at_once(width)); }

}  // namespace pdserve::ranks
