// The working memory of one work item of the attention through tiles.
#pragma once

#include "../state.h"

namespace pdserve::attention {
namespace {

constexpr int kTileQueries = 16;  // the columns of a tile of scores

[[maybe_unused]] int whole_tiles_of_queries(int num_queries) {
    return (num_queries + kTileQueries - 1) / kTileQueries;
}

// head_dim rounded up to the 32 elements that a row of a tile holds.
[[maybe_unused]] int tiled_head_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }

// Of values and of sums: those of the head, and a tile whose first column adds up the weights.
[[maybe_unused]] int num_columns(int head_dim) { return padded_head_dim(head_dim) + 16; }

// As State, for whole tiles of queries.
struct TileState {
    float* sums;    // [tiles * 16][num_columns]
    float* maxima;  // [tiles * 16]

    static size_t size(int num_queries, int head_dim) {
        const size_t queries = whole_tiles_of_queries(num_queries) * kTileQueries;
        return queries * (num_columns(head_dim) + 1);
    }

    static TileState at(float* start, int num_queries, int head_dim) {
        const size_t queries = whole_tiles_of_queries(num_queries) * kTileQueries;
        return {start, start + queries * num_columns(head_dim)};
    }
};

struct TileScratch {
    float* query_tiles;    // [tiles][tiled_dim / 32] tiles: pairs of dimensions by queries
    int32_t* positions;    // [tiles * 16], of the queries
    float* key_rows;       // [kTileKeys][tiled_dim] of bfloat16, where they are not side by side
    float* key_scales;     // [kTileKeys], of codes
    float* value_rows;     // [kTileKeys][padded_dim] of bfloat16, of codes
    float* values;         // [kTileKeys / 2][num_columns] pairs of keys
    float* seen_values;    // the same, for a query that does not see them all
    float* zero_row;       // [tiled_dim], stands in for keys and values that nobody sees
    float* scores;         // [kTileKeys][kTileQueries]
    float* pairs;          // [kTileKeys / 2][kTileQueries] pairs of weights
    float* weights;        // the same, transposed: [kTileQueries][kTileKeys] of bfloat16
    float* decays;         // [kTileQueries]
    float* tile_sums;      // [kTileQueries][num_columns]
    float* run;            // state of the run
    float* result;         // state of all runs
    size_t num_bytes;

    // With a null buffer, only num_bytes is valid.
    TileScratch(void* buffer, int num_queries, int head_dim) : num_bytes(0) {
        const size_t columns = num_columns(head_dim), tiled_dim = tiled_head_dim(head_dim);
        const size_t queries = whole_tiles_of_queries(num_queries) * kTileQueries;
        const auto carve = [&](size_t count) {
            char* start = static_cast<char*>(buffer) + num_bytes;
            num_bytes += (count * sizeof(float) + 63) / 64 * 64;
            return reinterpret_cast<float*>(start);
        };
        query_tiles = carve(queries * tiled_dim / 2);
        positions = reinterpret_cast<int32_t*>(carve(queries));
        key_rows = carve(kTileKeys * tiled_dim / 2);
        key_scales = carve(kTileKeys);
        value_rows = carve(kTileKeys * padded_head_dim(head_dim) / 2);
        values = carve(kTileKeys / 2 * columns);
        seen_values = carve(kTileKeys / 2 * columns);
        zero_row = carve(tiled_dim);
        scores = carve(kTileKeys * kTileQueries);
        pairs = carve(kTileKeys / 2 * kTileQueries);
        weights = carve(kTileKeys / 2 * kTileQueries);
        decays = carve(kTileQueries);
        tile_sums = carve(kTileQueries * columns);
        run = carve(TileState::size(num_queries, head_dim));
        result = carve(TileState::size(num_queries, head_dim));
    }
};

}  // namespace
}  // namespace pdserve::attention
