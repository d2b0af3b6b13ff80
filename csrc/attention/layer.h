// What the decoder asks of attention, layer by layer: arguments were checked once for the step.
#pragma once

#include <cstdint>
#include <vector>

#include "../cpu.h"
#include "kernel.h"

namespace pdserve::attention {

// A KV pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
struct Pool {
    void* data;
    bool is_bfloat16;
    int num_layers;
    int num_kv_heads;
    int block_size;
    int head_dim;
};

// The arrays of pdserve.engine.attention.AttentionBatch.
struct Step {
    int64_t num_requests;
    int64_t num_tokens;
    const int32_t* query_start;   // [num_requests + 1]
    const int32_t* context_lens;  // [num_requests]
    const int32_t* block_tables;  // [num_requests, table_stride]
    int64_t table_stride;
    const int64_t* slots;  // [num_tokens]
};

// How a step's attention is shared out: the same for all layers of one sliding window. Made once a
// step; making it again reuses its memory.
class Plan {
public:
    void make(const Step& step, const Pool& pool, int num_heads, int sliding_window);

private:
    friend void attend(const Plan&, int, const void*, int64_t, void*, float, Variant);
    // Whoever writes the launcher knows what belongs here.
};

// out[token, head] = attention of query head `head`; query rows are `query_stride` elements apart,
// heads stand side by side; out is [num_tokens, num_heads, head_dim], contiguous.
void attend(const Plan& plan, int layer, const void* query, int64_t query_stride, void* out,
    float scale, Variant variant);

// What is done to the output of the QKV product before attention, in one pass over it.
struct QkvRows {
    void* qkv;       // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], of the pool's type
    int64_t stride;  // elements between rows
    int num_heads;
    const float* q_norm;   // [head_dim]; null: the model does not normalise its heads
    const float* k_norm;   // [head_dim]
    float norm_eps;
    const float* cos_sin;  // [num_tokens, head_dim]: head_dim / 2 cosines, then the sines
};

// Normalises and turns queries (in place) and keys, and writes keys and values to their slots.
void rotate_and_write(
    const Step& step, const Pool& pool, int layer, const QkvRows& rows, Variant variant);

}  // namespace pdserve::attention
