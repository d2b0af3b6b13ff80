// The state of an online softmax: the partial result of attention over some of the keys.
//
// Keys are processed in runs of kRunKeys at aligned positions. Every run begins with an empty
// state, and the states of the runs are folded in ascending order. So runs can be divided among
// threads, and the result still has the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve::attention {
namespace {

constexpr int kTileKeys = 64;  // keys between two steps of the online softmax; aligned positions
constexpr int kRunKeys = 512;  // a multiple of kTileKeys
constexpr int kSumLanes = 16;  // of a softmax denominator, whatever the CPU's vectors

// head_dim rounded up to whole vectors of any instruction set.
[[maybe_unused]] int padded_head_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }

struct State {
    float* sums;    // [num_queries][padded_dim], weights x values so far
    float* totals;  // [num_queries][kSumLanes], weights so far
    float* maxima;  // [num_queries], largest score so far
};

// In floats. A multiple of 64 bytes, so that consecutive states stay aligned.
[[maybe_unused]] size_t state_size(int num_queries, int head_dim) {
    const size_t maxima = (num_queries + 15) / 16 * 16;
    return static_cast<size_t>(num_queries) * (padded_head_dim(head_dim) + kSumLanes) + maxima;
}

// Where threads share the runs of an item, a state takes as much as any kernel needs: those on
// tiles (amx/scratch.h) have whole tiles of 16 queries.
[[maybe_unused]] size_t shared_state_size(int num_queries, int head_dim) {
    return state_size((num_queries + 15) / 16 * 16, head_dim);
}

[[maybe_unused]] State state_at(float* start, int num_queries, int head_dim) {
    float* totals = start + static_cast<size_t>(num_queries) * padded_head_dim(head_dim);
    return {start, totals, totals + static_cast<size_t>(num_queries) * kSumLanes};
}

}  // namespace
}  // namespace pdserve::attention
