// Stores this step's keys and values in the paged pool.
#pragma once

#include <cstdint>

#include <nanobind/nanobind.h>

#include "../tensor_view.h"
#include "pool_view.h"

namespace pdserve::attention {

void write_kv(nanobind::handle kv_pool, int64_t layer, nanobind::handle key,
    nanobind::handle value, nanobind::handle slot_mapping);

// Raises TypeError or ValueError: not one slot of the pool for each token (-1: any number).
void check_slots(const TensorView& slots, int64_t num_tokens, const PoolView& pool);

}  // namespace pdserve::attention
