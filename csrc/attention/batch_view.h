// The tensors of an AttentionBatch as the attention launcher sees them, and every check of them.
#pragma once

#include <cstdint>

#include "../tensor_view.h"
#include "pool_view.h"

namespace pdserve::attention {

struct BatchView {
    TensorView query_start;
    TensorView context_lens;
    TensorView block_tables;
    int64_t num_requests;

    // Raises TypeError or ValueError: a dtype, shape or stride.
    BatchView(nanobind::handle query_start_object, nanobind::handle context_lens_object,
        nanobind::handle block_tables_object);

    // Raises ValueError: row counts, lengths or block ids with which a kernel would read out of
    // bounds.
    void check_values(int64_t num_tokens, const PoolView& pool) const;

    int32_t start(int64_t request) const { return query_start.data<int32_t>()[request]; }
    int32_t context_len(int64_t request) const { return context_lens.data<int32_t>()[request]; }

private:
    void check_request(int64_t request, const PoolView& pool) const;
};

// Raises TypeError or ValueError unless the rows are rows of the batch, ascending and distinct.
void check_rows(const TensorView& rows, int64_t num_tokens, const char* name);

}  // namespace pdserve::attention
