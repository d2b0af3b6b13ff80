// The arguments of the kernel that makes latent rows and turns queries.
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "store.h"

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

    StoredTo to;
};

using LatentKernels = StoreKernels<LatentCall>;

extern const LatentKernels kAvx512Bf16LatentKernels;
extern const LatentKernels kAvx512LatentKernels;
extern const LatentKernels kAvx2LatentKernels;
extern const LatentKernels kNeonBf16LatentKernels;
extern const LatentKernels kPortableLatentKernels;

}  // namespace pdserve::attention
