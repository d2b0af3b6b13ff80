// The arguments of the kernel of the gated delta rule (pdserve/engine/models/recurrent.py). No
// inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

namespace pdserve::recurrent {

constexpr int64_t kChunk = 16;  // tokens after which a head's matrix is written: CHUNK in Python

// Of one group: value heads that share a query and a key.
struct Shape {
    int64_t num_groups;    // of a rank
    int64_t model_groups;  // of all ranks: a state in the pool has these
    int64_t first_group;   // of the rank
    int64_t group_size;  // value heads
    int64_t key_dim;
    int64_t value_dim;
    int64_t kernel;  // tokens that the convolution sees
};

// Of one layer. A group's channels are its query, its key and its values.
struct Weights {
    const float* taps;        // [num_groups, kernel, channels], oldest first
    const float* decay;       // [num_groups, group_size], as checkpoints have it: a logarithm
    const float* decay_bias;  // likewise
    const float* value_norm;  // [value_dim]
    float norm_eps;
};

// A request's state in one group, row by row. Rows of values and keys may be read, as zeros, to
// whole vectors.
struct State {
    float* const* inputs;    // [kernel - 1] of channels: the last ones, oldest first
    float* const* matrices;  // [group_size * key_dim] of value_dim, as of the chunk's begin
    float* const* keys;      // [kChunk] of key_dim: those of the chunk's tokens so far
    float* const* deltas;    // [group_size * kChunk] of value_dim: what these add to the matrix
    float* const* shares;    // [group_size] of kChunk + 1: what is left of each, and of the matrix
};

// Rows of one request in one group. What is between rows of a request is `stride` or `out_stride`.
struct Rows {
    Shape shape;
    Weights weights;  // those of the group are the first
    int64_t num_rows;
    int64_t num_before;   // tokens of the chunk that are in the state
    const float* inputs;  // [num_rows] channels, and behind them gates [group_size, value_dim]
    const float* betas;   // [num_rows] betas [group_size], and decays
    int64_t stride;
    void* out;  // [num_rows] of [group_size, value_dim]
    int64_t out_stride;
    State state;     // goes on
    float* scratch;  // scratch_size(shape) numbers
};

using Function = void (*)(const Rows& rows);

struct Kernels {
    Function to_float32;
    Function to_bfloat16;
};

extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kNeonBf16Kernels;
extern const Kernels kPortableKernels;

}  // namespace pdserve::recurrent
