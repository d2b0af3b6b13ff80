// Normalises and rotates (RoPE) queries and keys, and stores keys and values, in one pass over the
// output of the QKV product, [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
//
// Works head by head, in float32 from the load to the rounding store. What a pool has as codes, or
// rounded to such, is rounded to the type of the product first. The result for a token does not
// depend on the rest of the batch.

#include <type_traits>

#include "../../../isa/build_name.h"
#include "rotate_head.h"
#include "rotate_kernel.h"
#include "stored_rows.h"

namespace pdserve::attention {
namespace {

// The norm of heads that are side by side: of each, or of all together.
template <bool kHasNorm, class T>
class HeadNorm {
public:
    // `mean_square`: of all together; null: of those that are here.
    HeadNorm(const RotateCall& call, const float* weight, const T* heads, int num_heads,
        const float* mean_square)
        : call_(call), weight_(weight) {
        if constexpr (!kHasNorm) return;
        if (!call.norms_together) return;
        factor_ = mean_square != nullptr
            ? 1.0f / __builtin_sqrtf(*mean_square + call.norm_eps)
            : norm_of(heads, int64_t{num_heads} * call.head_dim, call.norm_eps);
        stride_ = call.head_dim;
    }

    const float* weight(int h) const { return weight_ + h * stride_; }
    float factor(const T* head) const {
        if constexpr (!kHasNorm) return 1.0f;
        return stride_ != 0 ? factor_ : norm_of(head, call_.head_dim, call_.norm_eps);
    }

private:
    const RotateCall& call_;
    const float* const weight_;
    float factor_ = 1.0f;
    int64_t stride_ = 0;  // from the weights of a head to those of the next; 0: they share them
};

template <bool kHasNorm, class T, class S>
void rotate_token(const RotateCall& call, int64_t token) {
    const int64_t head_dim = call.head_dim;
    const int64_t head_elements = call.to.block_size * call.to.row_elements;
    T* row = static_cast<T*>(call.qkv) + token * call.row_stride;
    S* key = row_of<S>(call.to, token);
    S* value = key + call.value_offset;
    const float* cosines = call.cos_sin + token * head_dim;
    const float* means = call.mean_squares;
    if (means != nullptr) means += 2 * token;
    const HeadNorm<kHasNorm, T> q_norm(call, call.q_norm, row, call.num_heads, means);
    for (int h = 0; h < call.num_heads; ++h, row += head_dim) {
        rotate_head<kHasNorm>(
            row, call.head_dim, q_norm.weight(h), q_norm.factor(row), cosines, row);
    }
    if (means != nullptr) ++means;
    const HeadNorm<kHasNorm, T> k_norm(call, call.k_norm, row, call.num_kv_heads, means);
    for (int h = 0; h < call.num_kv_heads; ++h, row += head_dim, key += head_elements) {
        T* turned = row;
        if constexpr (std::is_same_v<S, T>) turned = key;
        rotate_head<kHasNorm>(
            row, call.head_dim, k_norm.weight(h), k_norm.factor(row), cosines, turned);
        if constexpr (!std::is_same_v<S, T>) store_row(turned, call.head_dim, key);
    }
    for (int h = 0; h < call.num_kv_heads; ++h, row += head_dim, value += head_elements) {
        store_row(row, call.head_dim, value);
    }
}

template <class T, class S>
void rotate_tokens(const RotateCall& call, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
        if (call.q_norm != nullptr) {
            rotate_token<true, T, S>(call, token);
        } else {
            rotate_token<false, T, S>(call, token);
        }
    }
}

}  // namespace

const RotateKernels PDSERVE_OF_THIS_BUILD(RotateKernels) = {
    {rotate_tokens<float, float>, rotate_tokens<float, Int8>, rotate_tokens<float, Fp8>,
        rotate_tokens<float, Rounded<float, Int8>>, rotate_tokens<float, Rounded<float, Fp8>>},
    {rotate_tokens<BFloat16, BFloat16>, rotate_tokens<BFloat16, Int8>, rotate_tokens<BFloat16, Fp8>,
        rotate_tokens<BFloat16, Rounded<BFloat16, Int8>>,
        rotate_tokens<BFloat16, Rounded<BFloat16, Fp8>>}};

}  // namespace pdserve::attention
