// The launcher of store_latent, for the decoder.

#include <algorithm>

#include "../isa/build_name.h"
#include "../threads/thread_pool.h"
#include "kernels/latent_kernel.h"
#include "layer.h"

namespace pdserve::attention {

namespace {

// Below this, waking a thread costs more than the work.
constexpr int64_t kElementsPerItem = 32 * 1024;

}  // namespace

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
        .layer_pool = static_cast<char*>(pool.data) + layer * pool.layer_bytes(),
        .block_stride = pool.num_layers * pool.layer_elements(),
        .row_elements = pool.row_elements(),
        .block_size = pool.block_size,
        .slots = step.slots,
    };
    const LatentKernels& kernels = PDSERVE_OF_VARIANT(variant, LatentKernels);
    const LatentFunction run =
        of_format(rows.is_bfloat16 ? kernels.bfloat16 : kernels.float32, pool.format);
    const int64_t token_elements =
        pool.head_dim + static_cast<int64_t>(rows.num_heads) * call.rope_dim;
    const int64_t tokens_per_item = std::max<int64_t>(1, kElementsPerItem / token_elements);
    const int64_t num_items = (step.num_tokens + tokens_per_item - 1) / tokens_per_item;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t first = item * tokens_per_item;
        run(call, first, std::min(step.num_tokens, first + tokens_per_item));
    });
}

}  // namespace pdserve::attention
