// The arguments of the kernel that rotates queries and keys.
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "../../isa/element.h"

namespace pdserve::attention {

// Strides are in elements. All fields have been checked.
struct RotateCall {
    void* qkv;  // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    int64_t row_stride;
    int num_heads;
    int num_kv_heads;
    int head_dim;  // even

    const float* q_norm;  // [head_dim]; null: heads are not normalised
    const float* k_norm;  // [head_dim]
    bool norms_together;  // all query heads, and all key heads: then norms are as wide as these
    const float* mean_squares;  // with it, [num_tokens, 2]; null: of the heads that are here
    float norm_eps;
    const float* cos_sin;  // [num_tokens, head_dim]

    void* layer_pool;  // as in Call
    int64_t block_stride;
    int64_t value_offset;
    int64_t row_elements;
    int block_size;
    const int64_t* slots;  // [num_tokens]
};

// Processes tokens [first, last).
using RotateFunction = void (*)(const RotateCall& call, int64_t first, int64_t last);

// For products of one type, by what the pool stores.
struct RotateFunctions {
    RotateFunction plain;
    RotateFunction int8;
    RotateFunction fp8;
};

struct RotateKernels {
    RotateFunctions float32;
    RotateFunctions bfloat16;
};

extern const RotateKernels kAvx512Bf16RotateKernels;
extern const RotateKernels kAvx512RotateKernels;
extern const RotateKernels kAvx2RotateKernels;
extern const RotateKernels kNeonBf16RotateKernels;
extern const RotateKernels kPortableRotateKernels;

}  // namespace pdserve::attention
