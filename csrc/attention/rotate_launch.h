// rotate_and_write for Python: checks every argument, then calls the function in layer.h.
#pragma once

#include <cstdint>

#include <nanobind/nanobind.h>

namespace pdserve::attention {

void rotate_and_write_checked(nanobind::handle qkv, int64_t num_heads, nanobind::handle q_norm,
    nanobind::handle k_norm, double norm_eps, nanobind::handle cos_sin, nanobind::handle kv_pool,
    int64_t layer, nanobind::handle slot_mapping, const char* variant_name);

}  // namespace pdserve::attention
