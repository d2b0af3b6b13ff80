// The checked launcher of paged attention: argument checks, the split into work items, threads.

#include "launch.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "../build_name.h"
#include "../cpu.h"
#include "../scratch_buffer.h"
#include "../tensor_view.h"
#include "../thread_pool.h"
#include "batch_view.h"
#include "kernel.h"
#include "pool_view.h"
#include "scratch.h"
#include "write_kv.h"

namespace nb = nanobind;

namespace pdserve {

namespace attention {

namespace {

// Enough queries a work item that packing its keys costs little beside using them; few enough that
// their sums stay in the L2 cache. The fewest is for when there would be too few items to share.
constexpr int kMostQueriesPerItem = 96;
constexpr int kFewestQueriesPerItem = 24;
constexpr int64_t kItemsPerThread = 4;

// What is costliest comes first, so that no thread is left with it at the end: the requests with
// the longest contexts, and of each request the rows that see most.
std::vector<WorkItem> work_items(const Call& call, int64_t num_requests, int num_threads) {
    const int group_size = call.num_heads / call.num_kv_heads;
    const int64_t num_tokens = call.query_start[num_requests];
    int queries = kMostQueriesPerItem;
    while (queries > kFewestQueriesPerItem
        && num_tokens * call.num_heads < kItemsPerThread * num_threads * queries) {
        queries /= 2;
    }
    const int rows_per_item = std::max(1, queries / group_size);

    std::vector<int32_t> requests(num_requests);
    std::iota(requests.begin(), requests.end(), 0);
    std::stable_sort(requests.begin(), requests.end(), [&](int32_t a, int32_t b) {
        return call.context_lens[a] > call.context_lens[b];
    });
    std::vector<WorkItem> items;
    for (int32_t r : requests) {
        const int num_rows = call.query_start[r + 1] - call.query_start[r];
        for (int end = num_rows; end > 0; end -= rows_per_item) {
            const int first = std::max(0, end - rows_per_item);
            for (int head = 0; head < call.num_kv_heads; ++head) {
                items.push_back({r, head, first, end - first});
            }
        }
    }
    return items;
}

void launch(const Call& call, int64_t num_requests, AttendFunction attend) {
    ThreadPool& pool = ThreadPool::instance();
    const std::vector<WorkItem> items = work_items(call, num_requests, pool.num_threads());
    pool.parallel_for(static_cast<int64_t>(items.size()), [&](int64_t i) {
        static thread_local ScratchBuffer scratch;
        const int num_queries = items[i].num_rows * (call.num_heads / call.num_kv_heads);
        const size_t num_bytes = Scratch(nullptr, num_queries, call.head_dim).num_bytes;
        attend(call, items[i], scratch.at_least(num_bytes));
    });
}

void check_numbers(double scale, int64_t sliding_window) {
    if (!std::isfinite(scale) || scale <= 0) {
        raise_value_error("scale", "a finite number above 0", std::to_string(scale));
    }
    if (sliding_window < 0 || sliding_window > INT32_MAX) {
        raise_value_error("sliding_window", "0 (none) or a number of tokens",
            std::to_string(sliding_window));
    }
}

void check_query(const TensorView& query, const TensorView& out, const PoolView& pool) {
    query.expect_type_of(pool.tensor);
    query.expect_shape({-1, -1, pool.head_dim}, "[num_tokens, num_heads, head_dim]");
    query.expect_contiguous_last_dim();
    if (query.size(1) < 1 || query.size(1) % pool.num_kv_heads != 0) {
        raise_value_error("query",
            "heads in a multiple of kv_pool's " + std::to_string(pool.num_kv_heads)
                + " KV heads",
            std::to_string(query.size(1)));
    }
    out.expect_type_of(pool.tensor);
    out.expect_shape({query.size(0), query.size(1), pool.head_dim}, "that of query");
    out.expect_contiguous();
}

void paged_attention(nb::handle query_object, nb::handle kv_pool, int64_t layer,
    nb::handle query_start, nb::handle context_lens, nb::handle block_tables, double scale,
    int64_t sliding_window, nb::handle out_object, const char* variant_name) {
    const PoolView pool(kv_pool, layer, Access::kRead);
    const TensorView query(query_object, "query");
    const TensorView out(out_object, "out", Access::kWrite);
    check_query(query, out, pool);
    const BatchView batch(query_start, context_lens, block_tables);
    batch.check_values(query.size(0), pool);
    check_numbers(scale, sliding_window);
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant_from(variant_name), Kernels);

    const Call call{
        .query = query.data<void>(),
        .query_row_stride = query.stride(0),
        .query_head_stride = query.stride(1),
        .out = out.data<void>(),
        .layer_pool = pool.layer_pool,
        .block_stride = pool.block_stride,
        .query_start = batch.query_start.data<int32_t>(),
        .context_lens = batch.context_lens.data<int32_t>(),
        .block_tables = batch.block_tables.data<int32_t>(),
        .table_stride = batch.block_tables.stride(0),
        .num_heads = static_cast<int>(query.size(1)),
        .num_kv_heads = static_cast<int>(pool.num_kv_heads),
        .head_dim = static_cast<int>(pool.head_dim),
        .block_size = static_cast<int>(pool.block_size),
        .scale = static_cast<float>(scale),
        .sliding_window = static_cast<int>(sliding_window),
    };
    const bool is_float = pool.tensor.type() == ElementType::kFloat32;
    nb::gil_scoped_release release;
    launch(call, batch.num_requests, is_float ? kernels.attend_float32 : kernels.attend_bfloat16);
}

}  // namespace

}  // namespace attention

void bind_attention(nb::module_& m) {
    using nb::arg;
    m.def("paged_attention", &attention::paged_attention, arg("query"), arg("kv_pool"),
        arg("layer"), arg("query_start"), arg("context_lens"), arg("block_tables"), arg("scale"),
        arg("sliding_window"), arg("out"), arg("variant") = "",
        "Causal attention of every query row over its request's blocks, into `out`.");
    m.def("write_kv", &attention::write_kv, arg("kv_pool"), arg("layer"), arg("key"), arg("value"),
        arg("slot_mapping"), "Store keys and values of one layer at their slots.");
}

}  // namespace pdserve
