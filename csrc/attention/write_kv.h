// Stores this step's keys and values in the paged pool.
#pragma once

#include <cstdint>

#include <nanobind/nanobind.h>

namespace pdserve::attention {

void write_kv(nanobind::handle kv_pool, int64_t layer, nanobind::handle key,
    nanobind::handle value, nanobind::handle slot_mapping);

}  // namespace pdserve::attention
