// The arguments of the kernel that makes latent rows and turns queries.
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "../../isa/element.h"

namespace pdserve::attention {

// Strides are in elements. All fields have been checked.
struct LatentCall {
    const float* rows;  // [num_tokens, rank + rope_dim]: latent vectors, and what is to be turned
    const float* norm;  // [rank], of the latent vectors
    float norm_eps;
    int rank;
    int rope_dim;          // even
    const float* cos_sin;  // [num_tokens, rope_dim]
    void* made;            // [num_tokens, rank + rope_dim], of the queries' type: rows as stored

    const void* queries;  // [num_tokens, num_heads, query_dim], of which the last are to be turned
    int num_heads;
    int query_dim;
    void* turned;  // [num_tokens, num_heads, rank + rope_dim]: the last of each are written

    void* layer_pool;  // as in Call
    int64_t block_stride;
    int64_t row_elements;
    int block_size;
    const int64_t* slots;  // [num_tokens]
};

// Processes tokens [first, last).
using LatentFunction = void (*)(const LatentCall& call, int64_t first, int64_t last);

// For queries of one type, by what the pool stores.
struct LatentFunctions {
    LatentFunction plain;
    LatentFunction int8;
    LatentFunction fp8;
};

struct LatentKernels {
    LatentFunctions float32;
    LatentFunctions bfloat16;
};

extern const LatentKernels kAvx512Bf16LatentKernels;
extern const LatentKernels kAvx512LatentKernels;
extern const LatentKernels kAvx2LatentKernels;
extern const LatentKernels kNeonBf16LatentKernels;
extern const LatentKernels kPortableLatentKernels;

}  // namespace pdserve::attention
