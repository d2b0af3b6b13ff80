// Latent attention: normalises latent vectors, rotates what is behind them, and stores both; and
// rotates queries. In float32 from the load to the rounding store. The result for a token does not
// depend on the rest of the batch.

#include "../../../isa/build_name.h"
#include "latent_kernel.h"
#include "rotate_head.h"
#include "stored_rows.h"

namespace pdserve::attention {
namespace {

template <class T>
PDSERVE_INLINE void normalise(const float* row, const float* norm, int size, float eps, T* out) {
    const float factor = norm_of(row, size, eps);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(out + i, load(row + i) * splat(factor) * load(norm + i));
    }
    for (; i < size; ++i) assign(out[i], row[i] * factor * norm[i]);
}

template <class T, class S>
void latent_token(const LatentCall& call, int64_t token) {
    const int row_dim = call.rank + call.rope_dim;
    const float* cosines = call.cos_sin + token * call.rope_dim;
    const float* row = call.rows + token * row_dim;
    T* made = static_cast<T*>(call.made) + token * row_dim;
    normalise(row, call.norm, call.rank, call.norm_eps, made);
    rotate_head<false>(row + call.rank, call.rope_dim, nullptr, 1.0f, cosines, made + call.rank);
    store_row(made, row_dim, row_of<S>(call.to, token));
    const int64_t first = token * call.num_heads;
    const T* query = static_cast<const T*>(call.queries) + first * call.query_dim
        + call.query_dim - call.rope_dim;
    T* turned = static_cast<T*>(call.turned) + first * row_dim + call.rank;
    for (int h = 0; h < call.num_heads; ++h, query += call.query_dim, turned += row_dim) {
        rotate_head<false>(query, call.rope_dim, nullptr, 1.0f, cosines, turned);
    }
}

template <class T, class S>
void latent_tokens(const LatentCall& call, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) latent_token<T, S>(call, token);
}

}  // namespace

const LatentKernels PDSERVE_OF_THIS_BUILD(LatentKernels) = {
    {latent_tokens<float, float>, latent_tokens<float, Int8>, latent_tokens<float, Fp8>,
        latent_tokens<float, Rounded<float, Int8>>, latent_tokens<float, Rounded<float, Fp8>>},
    {latent_tokens<BFloat16, BFloat16>, latent_tokens<BFloat16, Int8>, latent_tokens<BFloat16, Fp8>,
        latent_tokens<BFloat16, Rounded<BFloat16, Int8>>,
        latent_tokens<BFloat16, Rounded<BFloat16, Fp8>>}};

}  // namespace pdserve::attention
