// The arguments of the attention kernels, and the functions that each build of them provides.
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../isa/element.h"

namespace pdserve::attention {

// How a pool stores keys and values. A row, one token in one head, is head_dim numbers; or as many
// codes of 8 bits, and then the scale of them all, a float32.
enum class KvFormat { kFloat32, kBFloat16, kInt8, kFp8 };

// One call. Strides are in elements, of codes in bytes. All fields have been checked.
struct Call {
    const void* query;  // [num_tokens, num_heads, head_dim]
    int64_t query_row_stride;
    int64_t query_head_stride;
    void* out;  // [num_tokens, num_heads, head_dim], contiguous

    // The first head of this call in kv_pool[0, layer]; within a block: [planes, heads of the pool,
    // block_size] of rows
    const void* layer_pool;
    int64_t block_stride;
    int64_t value_offset;  // from a key to its value; 0: it is the value, too
    int64_t row_elements;  // from a key to that of the next token

    const int32_t* query_start;  // [num_requests + 1]
    const int32_t* context_lens;  // [num_requests]
    const int32_t* block_tables;  // rows of table_stride
    int64_t table_stride;

    int num_heads;
    int num_kv_heads;
    int head_dim;
    int block_size;
    float scale;
    float cap;           // scores become cap * tanh(score / cap); 0: they do not
    const float* sinks;  // [num_heads]: one more score of each, of no value; null: there are none
    int sliding_window;  // 0: none
};

// The unit of work: some consecutive rows of one request, for the query heads of some KV heads.
struct WorkItem {
    int32_t request;
    int32_t first_head;  // of the KV heads
    int32_t num_heads;   // one, if runs are shared out
    int32_t first_row;   // within the request
    int32_t num_rows;
    int32_t first_run;  // of keys, state.h; an item of all runs ends after the last
    int32_t last_run;
    int32_t shared;  // the index of what it is a part of; -1: all runs are in this item
};

// `scratch` is aligned to 64 bytes, and as large as scratch.h says for the item's queries.
// `states` receives the state of each run of the item, one after the other. With null, the runs are
// folded and the output is written instead.
using AttendFunction = void (*)(
    const Call& call, const WorkItem& item, void* scratch, float* states);

// Folds the states of all runs of an item, as attend does, and writes the result out.
using FoldFunction = void (*)(
    const Call& call, const WorkItem& item, void* scratch, const float* states);

struct AttendKernels {
    AttendFunction attend;
    FoldFunction fold;
};

// By the type of queries. Keys and values are of that type, or codes.
struct Kernels {
    AttendKernels float32;
    AttendKernels bfloat16;
};

// Of bfloat16, through tiles (isa/amx.h), by what keys and values are.
struct TileKernels {
    AttendKernels plain;
    AttendKernels int8;
    AttendKernels fp8;
};

extern const TileKernels kAmxTileKernels;
extern const TileKernels kAmxEmulatedTileKernels;

extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kNeonBf16Kernels;
extern const Kernels kPortableKernels;

extern const Kernels kAvx512Bf16Int8Kernels;
extern const Kernels kAvx512Int8Kernels;
extern const Kernels kAvx2Int8Kernels;
extern const Kernels kNeonBf16Int8Kernels;
extern const Kernels kPortableInt8Kernels;

extern const Kernels kAvx512Bf16Fp8Kernels;
extern const Kernels kAvx512Fp8Kernels;
extern const Kernels kAvx2Fp8Kernels;
extern const Kernels kNeonBf16Fp8Kernels;
extern const Kernels kPortableFp8Kernels;

}  // namespace pdserve::attention
