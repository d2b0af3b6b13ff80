// The launcher of store_latent, for the decoder.

#include "../isa/build_name.h"
#include "kernels/store/latent_kernel.h"
#include "layer.h"
#include "store_launch.h"

namespace pdserve::attention {

void store_latent(
    const Step& step, const Pool& pool, int layer, const LatentRows& rows, Variant variant) {
    const LatentCall call{
        .rows = rows.rows,
        .norm = rows.norm,
        .norm_eps = rows.norm_eps,
        .rank = rows.rank,
        .rope_dim = pool.head_dim - rows.rank,
        .cos_sin = rows.cos_sin,
        .made = rows.made,
        .queries = rows.queries,
        .num_heads = rows.num_heads,
        .query_dim = rows.query_dim,
        .turned = rows.turned,
        .to = stored_to(step, pool, layer),
    };
    const LatentKernels& kernels = PDSERVE_OF_VARIANT(variant, LatentKernels);
    store_tokens(call, rows.is_bfloat16 ? kernels.bfloat16 : kernels.float32, pool,
        step.num_tokens, pool.head_dim + static_cast<int64_t>(rows.num_heads) * call.rope_dim);
}

}  // namespace pdserve::attention
