// The working memory of one work item, carved out of one buffer of its thread.
#pragma once

#include "state.h"

namespace pdserve::attention {
namespace {

constexpr int kMaxQueries = 6;  // that are done together

// With more queries than this, keys and values are packed; with fewer, they are read in place where
// possible.
constexpr int kMostQueriesInPlace = 2 * kMaxQueries;

struct Scratch {
    float* queries;      // [num_queries][padded_dim], or as many pairs of bfloat16
    float* packed_keys;  // [padded_dim][kTileKeys], or as many pairs
    float* key_rows;     // [kTileKeys][padded_dim] of bfloat16, where they are not side by side
    float* values;       // [kTileKeys][padded_dim], where they cannot be used in place
    float* key_scales;   // [kTileKeys], of codes
    float* value_scales;  // [kTileKeys]
    float* zero_row;     // [padded_dim], stands in for keys and values that nobody sees
    float* scores;       // [kMaxQueries][kTileKeys], then the softmax weights
    float* decays;       // [kMaxQueries], what this tile's new maximum makes of earlier sums
    float* factors;      // [kMaxQueries], of sums of integers
    float* run;          // state of the run
    float* result;       // state of all runs
    size_t num_bytes;

    // With a null buffer, only num_bytes is valid.
    Scratch(void* buffer, int num_queries, int head_dim) : num_bytes(0) {
        const size_t padded_dim = padded_head_dim(head_dim);
        const auto carve = [&](size_t count) {
            char* start = static_cast<char*>(buffer) + num_bytes;
            num_bytes += (count * sizeof(float) + 63) / 64 * 64;
            return reinterpret_cast<float*>(start);
        };
        queries = carve(static_cast<size_t>(num_queries) * padded_dim);
        packed_keys = carve(kTileKeys * padded_dim);
        key_rows = carve(kTileKeys * padded_dim / 2);
        values = carve(kTileKeys * padded_dim);
        key_scales = carve(kTileKeys);
        value_scales = carve(kTileKeys);
        zero_row = carve(padded_dim);
        scores = carve(kMaxQueries * kTileKeys);
        decays = carve(kMaxQueries);
        factors = carve(kMaxQueries);
        run = carve(state_size(num_queries, head_dim));
        result = carve(state_size(num_queries, head_dim));
    }
};

}  // namespace
}  // namespace pdserve::attention
