// The arguments of the kernel that rotates queries and keys.
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "store.h"

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

    StoredTo to;
    int64_t value_offset;  // of values behind keys, in elements
};

using RotateKernels = StoreKernels<RotateCall>;

extern const RotateKernels kAvx512Bf16RotateKernels;
extern const RotateKernels kAvx512RotateKernels;
extern const RotateKernels kAvx2RotateKernels;
extern const RotateKernels kNeonBf16RotateKernels;
extern const RotateKernels kPortableRotateKernels;

}  // namespace pdserve::attention
