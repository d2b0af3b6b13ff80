// What the attention kernels are told, and what the launcher may ask of each build of them.
// No inline functions here; see element.h for why.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../element.h"

namespace pdserve::attention {

// One call. Strides count elements; everything is checked before it comes here.
struct Call {
    const void* query;  // [num_tokens, num_heads, head_dim]
    int64_t query_row_stride;
    int64_t query_head_stride;
    void* out;  // [num_tokens, num_heads, head_dim], contiguous

    // kv_pool[0, layer]; within a block: [2, num_kv_heads, block_size, head_dim]
    const void* layer_pool;
    int64_t block_stride;

    const int32_t* query_start;  // [num_requests + 1]
    const int32_t* context_lens;  // [num_requests]
    const int32_t* block_tables;  // rows of table_stride
    int64_t table_stride;

    int num_heads;
    int num_kv_heads;
    int head_dim;
    int block_size;
    float scale;
    int sliding_window;  // 0: none
};

// The unit of work: some consecutive rows of one request, for the query heads of one KV head.
struct WorkItem {
    int32_t request;
    int32_t kv_head;
    int32_t first_row;  // within the request
    int32_t num_rows;
};

// `scratch` is aligned to 64 bytes, and as large as scratch.h says for the item's queries.
using AttendFunction = void (*)(const Call& call, const WorkItem& item, void* scratch);

struct Kernels {
    AttendFunction attend_float32;
    AttendFunction attend_bfloat16;
};

extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kPortableKernels;

}  // namespace pdserve::attention
