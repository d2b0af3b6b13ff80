// The checked launcher of paged attention.

#include "launch.h"

#include <cmath>
#include <optional>
#include <string>

#include "../bind.h"
#include "../tensor_view.h"
#include "batch_view.h"
#include "layer.h"
#include "pool_view.h"
#include "rotate_launch.h"
#include "write_kv.h"

namespace nb = nanobind;

namespace pdserve {

namespace attention {

namespace {

void check_numbers(double scale, double cap, int64_t sliding_window) {
    if (!std::isfinite(scale) || scale <= 0) {
        raise_value_error("scale", "a finite number above 0", std::to_string(scale));
    }
    if (!std::isfinite(cap) || cap < 0) {
        raise_value_error("cap", "0 (none) or a finite number", std::to_string(cap));
    }
    if (sliding_window < 0 || sliding_window > INT32_MAX) {
        raise_value_error("sliding_window", "0 (none) or a number of tokens",
            std::to_string(sliding_window));
    }
}

void check_query(const TensorView& query, const TensorView& out, const PoolView& pool) {
    pool.expect_fits(query);
    query.expect_shape({-1, -1, pool.head_dim}, "[num_tokens, num_heads, head_dim]");
    query.expect_contiguous_last_dim();
    if (query.size(1) < 1 || query.size(1) % pool.num_kv_heads != 0) {
        raise_value_error("query",
            "heads in a multiple of kv_pool's " + std::to_string(pool.num_kv_heads)
                + " KV heads",
            std::to_string(query.size(1)));
    }
    out.expect_type_of(query);
    out.expect_shape({query.size(0), query.size(1), pool.head_dim}, "that of query");
    out.expect_contiguous();
}

void paged_attention(nb::handle query_object, nb::handle kv_pool, int64_t layer,
    nb::handle query_start, nb::handle context_lens, nb::handle block_tables, double scale,
    int64_t sliding_window, nb::handle out_object, nb::handle rows_object,
    const char* variant_name, double cap, nb::handle sinks_object) {
    const PoolView pool(kv_pool, layer, Access::kRead);
    const TensorView query(query_object, "query");
    const TensorView out(out_object, "out", Access::kWrite);
    check_query(query, out, pool);
    const BatchView batch(query_start, context_lens, block_tables);
    batch.check_values(query.size(0), pool);
    check_numbers(scale, cap, sliding_window);
    std::optional<TensorView> chosen;
    if (!rows_object.is_none()) {
        chosen.emplace(rows_object, "rows");
        check_rows(*chosen, query.size(0), "rows");
    }
    std::optional<TensorView> sinks;
    if (!sinks_object.is_none()) {
        sinks.emplace(sinks_object, "sinks");
        sinks->expect_type({ElementType::kFloat32});
        sinks->expect_shape({query.size(1)}, "[num_heads]");
        sinks->expect_contiguous();
    }
    const Variant variant = variant_from(variant_name);
    const Step step{
        .num_requests = batch.num_requests,
        .num_tokens = query.size(0),
        .query_start = batch.query_start.data<int32_t>(),
        .context_lens = batch.context_lens.data<int32_t>(),
        .block_tables = batch.block_tables.data<int32_t>(),
        .table_stride = batch.block_tables.stride(0),
        .slots = nullptr,
    };
    const QueryRows rows{query.data<void>(), query.stride(0), query.stride(1),
        query.type() == ElementType::kBFloat16};
    const RowChoice choice =
        chosen ? RowChoice{chosen->data<int64_t>(), chosen->size(0)} : RowChoice{};
    nb::gil_scoped_release release;
    Plan plan;
    plan.make(step, pool.pool(), static_cast<int>(query.size(1)), static_cast<int>(sliding_window),
        choice);
    const Scoring scoring{static_cast<float>(scale), static_cast<float>(cap),
        sinks ? sinks->data<float>() : nullptr};
    attend(plan, step, static_cast<int>(layer), rows, out.data<void>(), scoring, variant);
}

}  // namespace

}  // namespace attention

void bind_attention(nb::module_& m) {
    using nb::arg;
    m.def("paged_attention", &attention::paged_attention, arg("query"), arg("kv_pool"),
        arg("layer"), arg("query_start"), arg("context_lens"), arg("block_tables"), arg("scale"),
        arg("sliding_window"), arg("out"), arg("rows") = nb::none(), arg("variant") = "",
        arg("cap") = 0.0, arg("sinks") = nb::none(),
        "Causal attention of every query row over its request's blocks, into `out`.");
    m.def("write_kv", &attention::write_kv, arg("kv_pool"), arg("layer"), arg("key"), arg("value").none(),
        arg("slot_mapping"), "Store keys and values of one layer at their slots.");
    m.def("rotate_and_write", &attention::rotate_and_write_checked, arg("qkv"), arg("num_heads"),
        arg("q_norm").none(), arg("k_norm").none(), arg("norm_eps"), arg("cos_sin"),
        arg("kv_pool"), arg("layer"), arg("slot_mapping"), arg("variant") = "",
        "Normalise and turn queries and keys of a fused product; store keys and values.");
}

}  // namespace pdserve
