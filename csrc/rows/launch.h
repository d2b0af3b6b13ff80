// The operations on rows of the residual stream between the products.
#pragma once

#include <cstdint>

#include <nanobind/nanobind.h>

#include "../isa/cpu.h"
#include "kernel.h"

namespace pdserve {

namespace rows {

// Raises ValueError: an id is not in [0, num_entries); `name` is that of the array.
void check_ids(const int64_t* ids, int64_t num_rows, int64_t num_entries, const char* name);

// Arguments are not checked here. The rows are divided among the ThreadPool.
void normalise(const Norm& norm, int64_t num_rows, bool to_bfloat16, Variant variant);
void round_rows(const Norm& rows, int64_t num_rows, bool to_bfloat16, Variant variant);
void add_normalised(const Norm& norm, int64_t num_rows, Variant variant);  // to float32
void look_up(const Lookup& lookup, int64_t num_rows, bool from_bfloat16, Variant variant);
void cap(const Cap& cap, int64_t num_rows, Variant variant);
void weigh(const Weigh& weigh, int64_t num_rows, bool is_bfloat16, Variant variant);

}  // namespace rows

void bind_rows(nanobind::module_& m);

}  // namespace pdserve
