// The working memory of one work item, carved out of one buffer of its thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve::attention {
namespace {

constexpr int kTileKeys = 64;  // keys between two steps of the online softmax; aligned positions
constexpr int kSumLanes = 16;  // of a softmax denominator, whatever the CPU's vectors

// head_dim in whole vectors of any instruction set.
[[maybe_unused]] int padded_head_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }

struct Scratch {
    float* queries;      // [num_queries][padded_dim], or as many pairs of bfloat16
    float* packed_keys;  // [head_dim][kTileKeys], or as many pairs
    float* values;       // [kTileKeys][padded_dim], where they cannot be used in place
    float* zero_row;     // [padded_dim], stands in for keys that nobody sees
    float* scores;       // [num_queries][kTileKeys], then the softmax weights
    float* sums;         // [num_queries][padded_dim], weights x values so far
    float* totals;       // [num_queries][kSumLanes], weights so far
    float* maxima;       // [num_queries], largest score so far
    float* decays;       // [num_queries], what this tile's new maximum makes of earlier sums
    size_t num_bytes;

    // With a null buffer, only num_bytes means anything.
    Scratch(void* buffer, int num_queries, int head_dim) : num_bytes(0) {
        const size_t queries_count = num_queries;
        const size_t padded_dim = padded_head_dim(head_dim);
        const auto carve = [&](size_t count) {
            char* start = static_cast<char*>(buffer) + num_bytes;
            num_bytes += (count * sizeof(float) + 63) / 64 * 64;
            return reinterpret_cast<float*>(start);
        };
        queries = carve(queries_count * padded_dim);
        packed_keys = carve(kTileKeys * padded_dim);
        values = carve(kTileKeys * padded_dim);
        zero_row = carve(padded_dim);
        scores = carve(queries_count * kTileKeys);
        sums = carve(queries_count * padded_dim);
        totals = carve(queries_count * kSumLanes);
        maxima = carve(queries_count);
        decays = carve(queries_count);
    }
};

}  // namespace
}  // namespace pdserve::attention
