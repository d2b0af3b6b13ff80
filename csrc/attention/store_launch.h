// How kernels that store rows of KV are run: by tokens, on all threads.
#pragma once

#include <algorithm>

#include "../threads/thread_pool.h"
#include "kernels/store/store.h"
#include "layer.h"

namespace pdserve::attention {

inline StoredTo stored_to(const Step& step, const Pool& pool, int layer) {
    return {
        .layer_pool = static_cast<char*>(pool.data) + layer * pool.layer_bytes(),
        .block_stride = pool.num_layers * pool.layer_elements(),
        .row_elements = pool.row_elements(),
        .block_size = pool.block_size,
        .slots = step.slots,
    };
}

// `functions`: for the type of the activations. `token_elements`: that a token has of these.
template <class Call>
void store_tokens(const Call& call, const StoreFunctions<Call>& functions, const Pool& pool,
    int64_t num_tokens, int64_t token_elements) {
    constexpr int64_t kElementsPerItem = 32 * 1024;  // fewer are not worth waking a thread
    const StoreFunction<Call> run = storing_in(pool, functions);
    const int64_t tokens_per_item = std::max<int64_t>(1, kElementsPerItem / token_elements);
    const int64_t num_items = (num_tokens + tokens_per_item - 1) / tokens_per_item;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t first = item * tokens_per_item;
        run(call, first, std::min(num_tokens, first + tokens_per_item));
    });
}

}  // namespace pdserve::attention
