// Normalises and rotates (RoPE) queries and keys, and stores keys and values, in one pass over the
// output of the QKV product, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
//
// Works head by head, in float32 from the load to the rounding store. The result for a token does
// not depend on the rest of the batch.

#include "../../isa/build_name.h"
#include "../../isa/simd.h"
#include "rotate_kernel.h"

namespace pdserve::attention {
namespace {

// 1 / root mean square of a head; 1 if the model has no norm for heads.
template <class T>
PDSERVE_INLINE float norm_of(const T* head, int head_dim, float eps) {
    FloatLanes squares = {};
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
        const FloatLanes x = load(head + d);
        squares = multiply_add(squares, x, x);
    }
    float sum = sum_of(squares);
    for (; d < head_dim; ++d) sum += to_float(head[d]) * to_float(head[d]);
    return 1.0f / __builtin_sqrtf(sum / static_cast<float>(head_dim) + eps);
}

// Rotates each pair (head[i], head[i + half]); `target` may be `head`.
template <bool kHasNorm, class T>
PDSERVE_INLINE void rotate_head(const T* head, int head_dim, const float* norm, float eps,
    const float* cosines, T* target) {
    const int half = head_dim / 2;
    const float* sines = cosines + half;
    const float factor = kHasNorm ? norm_of(head, head_dim, eps) : 1.0f;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        FloatLanes a = load(head + i), b = load(head + half + i);
        if constexpr (kHasNorm) {
            a = a * splat(factor) * load(norm + i);
            b = b * splat(factor) * load(norm + half + i);
        }
        const FloatLanes cosine = load(cosines + i), sine = load(sines + i);
        store(target + i, a * cosine - b * sine);
        store(target + half + i, b * cosine + a * sine);
    }
    for (; i < half; ++i) {
        float a = to_float(head[i]), b = to_float(head[half + i]);
        if constexpr (kHasNorm) {
            a = a * factor * norm[i];
            b = b * factor * norm[half + i];
        }
        assign(target[i], a * cosines[i] - b * sines[i]);
        assign(target[half + i], b * cosines[i] + a * sines[i]);
    }
}

template <bool kHasNorm, class T>
void rotate_token(const RotateCall& call, int64_t token) {
    const int64_t head_dim = call.head_dim;
    const int64_t slot = call.slots[token];
    const int64_t head_elements = call.block_size * head_dim;
    T* row = static_cast<T*>(call.qkv) + token * call.row_stride;
    T* key = static_cast<T*>(call.layer_pool) + slot / call.block_size * call.block_stride
        + slot % call.block_size * head_dim;
    T* value = key + call.value_offset;
    const float* cosines = call.cos_sin + token * head_dim;
    for (int h = 0; h < call.num_heads; ++h, row += head_dim) {
        rotate_head<kHasNorm>(row, call.head_dim, call.q_norm, call.norm_eps, cosines, row);
    }
    for (int h = 0; h < call.num_kv_heads; ++h, row += head_dim, key += head_elements) {
        rotate_head<kHasNorm>(row, call.head_dim, call.k_norm, call.norm_eps, cosines, key);
    }
    for (int h = 0; h < call.num_kv_heads; ++h, row += head_dim, value += head_elements) {
        __builtin_memcpy(value, row, head_dim * sizeof(T));
    }
}

template <class T>
void rotate_tokens(const RotateCall& call, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
        if (call.q_norm != nullptr) {
            rotate_token<true, T>(call, token);
        } else {
            rotate_token<false, T>(call, token);
        }
    }
}

}  // namespace

const RotateKernels PDSERVE_OF_THIS_BUILD(RotateKernels) = {
    rotate_tokens<float>, rotate_tokens<BFloat16>};

}  // namespace pdserve::attention
