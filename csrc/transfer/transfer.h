// Binds the native half of the KV transfer into pdserve._native.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Adds copy_spans, copy_rates, block_spans, send_spans, recv_spans and find_stale;
// pdserve/_native.pyi documents them.
void bind_transfer(nanobind::module_& m);

}  // namespace pdserve
