// Attention for the decoder, layer by layer. The arguments were checked once for the whole step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../isa/cpu.h"
#include "../scratch_buffer.h"
#include "kernels/kernel.h"

namespace pdserve::attention {

constexpr int kScaleBytes = sizeof(float);  // behind the codes of a row

inline bool is_coded(KvFormat format) {
    return format == KvFormat::kInt8 || format == KvFormat::kFp8;
}

inline int64_t element_bytes(KvFormat format) {
    return is_coded(format) ? 1 : format == KvFormat::kBFloat16 ? 2 : 4;
}

// Of functions for one type of queries: what a pool of this format takes.
template <class Functions>
const auto& of_format(const Functions& functions, KvFormat format) {
    if (!is_coded(format)) return functions.plain;
    return format == KvFormat::kInt8 ? functions.int8 : functions.fp8;
}

// A KV pool [num_blocks, num_layers, num_planes, pool_heads, block_size] of rows, of which a
// tensor-parallel rank uses num_kv_heads consecutive heads. With one plane, rows are keys and values.
struct Pool {
    void* data;  // at the first of these heads
    KvFormat format;
    int num_layers;
    int num_planes;
    int pool_heads;
    int num_kv_heads;
    int block_size;
    int head_dim;
    KvFormat rounding = KvFormat::kFloat32;  // of codes: what numbers are rounded to

    int64_t row_elements() const { return head_dim + (is_coded(format) ? kScaleBytes : 0); }
    int64_t head_elements() const { return block_size * row_elements(); }
    int64_t layer_elements() const { return num_planes * pool_heads * head_elements(); }
    int64_t value_offset() const {  // from a key
        return (num_planes - 1) * pool_heads * head_elements();
    }
    int64_t layer_bytes() const { return layer_elements() * element_bytes(format); }
};

// Of functions that store what queries of one type have made: what a pool takes.
template <class Functions>
auto storing_in(const Pool& pool, const Functions& functions) {
    if (is_coded(pool.format) || !is_coded(pool.rounding)) return of_format(functions, pool.format);
    return pool.rounding == KvFormat::kInt8 ? functions.rounded_int8 : functions.rounded_fp8;
}

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

// A choice of rows of the batch, ascending.
struct RowChoice {
    const int64_t* rows = nullptr;
    int64_t num_rows = -1;  // -1: all of them
};

// Queries of a layer: [num_tokens, num_heads, head_dim], strides in elements.
struct QueryRows {
    const void* data;
    int64_t row_stride;
    int64_t head_stride;
    bool is_bfloat16;  // as is a pool of bfloat16; else float32
};

// What is made of a dot product before the softmax.
struct Scoring {
    float scale;
    float cap = 0;  // scores become cap * tanh(score / cap); 0: they do not
    const float* sinks = nullptr;  // [num_heads]: one more score of each, of no value
};

// How the attention of a step is divided among threads; the same for all layers with the same
// sliding window. Borrows the arrays of the step and of the choice. Made once a step; making it
// again reuses its memory.
class Plan {
public:
    // With a choice, only these rows are computed: the last layer needs only the rows that are
    // sampled.
    void make(const Step& step, const Pool& pool, int num_heads, int sliding_window,
        RowChoice choice = {});

private:
    friend void attend(Plan&, const Step&, int, const QueryRows&, void*, const Scoring&, Variant);

    // An item whose runs are divided among threads. The thread that finishes the last part folds
    // the states of all runs.
    struct SharedItem {
        WorkItem whole;
        int32_t first_run;
        int32_t num_parts;
        size_t states;  // offset of its first run's
    };

    void add_request(int32_t request, RowChoice choice);
    void add_rows(int32_t request, int32_t first_row, int32_t last_row);
    void share_out(int num_threads);
    void share_runs(const WorkItem& item, int32_t num_parts);
    void reserve_memory();
    size_t state_size_of(const WorkItem& item) const;

    Call call_;  // but for what a layer has of its own
    Pool pool_;
    int rows_per_item_;
    std::vector<int32_t> requests_;
    std::vector<WorkItem> chunks_;  // of rows, each for all KV heads
    std::vector<WorkItem> items_;
    std::vector<SharedItem> shared_;
    std::vector<int32_t> parts_left_;  // of each shared item; changed atomically
    ScratchBuffer states_;  // of all runs of shared items
    float* first_state_;
    size_t num_state_floats_;
    size_t scratch_bytes_;  // of the largest item
};

// Computes attention for the plan's rows, into the same rows of out [num_tokens, num_heads,
// head_dim], contiguous. The step is that of the plan, perhaps with other blocks for its tokens.
// A plan can be used by one call at a time. A row's result depends, bit for
// bit, only on that row and its request's KV.
void attend(Plan& plan, const Step& step, int layer, const QueryRows& query, void* out, const Scoring& scoring,
    Variant variant);

// The step between the QKV product and attention, done in one pass.
struct QkvRows {
    void* qkv;       // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    bool is_bfloat16;
    int64_t stride;  // elements between rows
    int num_heads;
    const float* q_norm;   // [head_dim]; null: the model does not normalise its heads
    const float* k_norm;   // [head_dim]
    bool norms_together = false;  // all heads of each: then norms are as wide as these
    const float* mean_squares = nullptr;  // with it, [num_tokens, 2]; null: of these heads
    float norm_eps;
    const float* cos_sin;  // [num_tokens, head_dim]: head_dim / 2 cosines, then the sines
};

// Normalises and rotates (RoPE) queries in place and keys (perhaps in place, too), and writes keys and values to their
// slots. head_dim is even. Rounds once, at the end. The result for a token does not depend on other
// tokens.
void rotate_and_write(
    const Step& step, const Pool& pool, int layer, const QkvRows& rows, Variant variant);

// Of latent attention: between the products and the attention.
struct LatentRows {
    const float* rows;  // [num_tokens, head_dim of the pool]: latent vectors, and what is turned
    const float* norm;  // [rank], of the latent vectors
    float norm_eps;
    int rank;
    const float* cos_sin;  // [num_tokens, rope_dim], the rest of a row: cosines, then the sines
    void* made;            // [num_tokens, head_dim], of the queries' type: memory

    const void* queries;  // [num_tokens, num_heads, query_dim]
    bool is_bfloat16;
    int num_heads;
    int query_dim;
    void* turned;  // [num_tokens, num_heads, head_dim]
};

// Normalises latent vectors, rotates what is behind them, and stores both at the tokens' slots.
// Rotates the last rope_dim of each query into the last of its place in `turned`.
void store_latent(
    const Step& step, const Pool& pool, int layer, const LatentRows& rows, Variant variant);

// The mean squares of the query heads, and of the key heads, of rows [first, first + count): into
// out[count, 2].
void measure_heads(const QkvRows& rows, int num_kv_heads, int head_dim, int64_t first,
    int64_t count, float* out);

}  // namespace pdserve::attention
