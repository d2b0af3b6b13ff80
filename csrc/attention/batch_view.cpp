// Checks a batch in one pass over its rows, lengths and block ids.

#include "batch_view.h"

#include <string>

namespace nb = nanobind;

namespace pdserve::attention {

namespace {

std::string at(const char* name, int64_t index) {
    return std::string(name) + "[" + std::to_string(index) + "]";
}

}  // namespace

BatchView::BatchView(nb::handle query_start_object, nb::handle context_lens_object,
    nb::handle block_tables_object)
    : query_start(query_start_object, "query_start"),
      context_lens(context_lens_object, "context_lens"),
      block_tables(block_tables_object, "block_tables") {
    query_start.expect_type({ElementType::kInt32});
    context_lens.expect_type({ElementType::kInt32});
    block_tables.expect_type({ElementType::kInt32});
    context_lens.expect_shape({-1}, "[num_requests]");
    num_requests = context_lens.size(0);
    query_start.expect_shape({num_requests + 1}, "[num_requests + 1]");
    block_tables.expect_shape({num_requests, -1}, "[num_requests, max_blocks]");
    query_start.expect_contiguous();
    context_lens.expect_contiguous();
    block_tables.expect_contiguous_last_dim();
}

void BatchView::check_values(int64_t num_tokens, const PoolView& pool) const {
    if (start(0) != 0) raise_value_error("query_start[0]", "0", std::to_string(start(0)));
    for (int64_t r = 0; r < num_requests; ++r) {
        if (start(r + 1) < start(r)) {
            raise_value_error(at("query_start", r + 1),
                "at least " + std::to_string(start(r)) + ", the entry before",
                std::to_string(start(r + 1)));
        }
        check_request(r, pool);
    }
    if (start(num_requests) != num_tokens) {
        raise_value_error(at("query_start", num_requests),
            std::to_string(num_tokens) + ", the rows of query",
            std::to_string(start(num_requests)));
    }
}

void BatchView::check_request(int64_t r, const PoolView& pool) const {
    const int32_t num_rows = start(r + 1) - start(r);
    if (context_len(r) < num_rows) {
        raise_value_error(at("context_lens", r),
            "at least the " + std::to_string(num_rows) + " rows of the request",
            std::to_string(context_len(r)));
    }
    const int64_t num_blocks = (context_len(r) + pool.block_size - 1) / pool.block_size;
    if (num_blocks > block_tables.size(1)) {
        raise_value_error("block_tables",
            "at least " + std::to_string(num_blocks) + " columns for "
                + at("context_lens", r) + " = " + std::to_string(context_len(r))
                + " and block size " + std::to_string(pool.block_size),
            std::to_string(block_tables.size(1)));
    }
    const int32_t* table = block_tables.data<int32_t>() + r * block_tables.stride(0);
    for (int64_t b = 0; b < num_blocks; ++b) {
        if (table[b] < 0 || table[b] >= pool.num_blocks) {
            raise_value_error(at("block_tables", r) + "[" + std::to_string(b) + "]",
                "a block id below " + std::to_string(pool.num_blocks),
                std::to_string(table[b]));
        }
    }
}

void check_rows(const TensorView& rows, int64_t num_tokens, const char* name) {
    rows.expect_type({ElementType::kInt64});
    rows.expect_shape({-1}, "[num_rows]");
    rows.expect_contiguous();
    const int64_t* row = rows.data<int64_t>();
    for (int64_t i = 0; i < rows.size(0); ++i) {
        const int64_t lowest = i == 0 ? 0 : row[i - 1] + 1;
        if (row[i] < lowest || row[i] >= num_tokens) {
            raise_value_error(at(name, i),
                "a row from " + std::to_string(lowest) + " to " + std::to_string(num_tokens - 1),
                std::to_string(row[i]));
        }
    }
}

}  // namespace pdserve::attention
