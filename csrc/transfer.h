// Binds the native half of the KV transfer into pdserve._native.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Adds copy_spans, send_spans, recv_spans and find_stale, which pdserve/_native.pyi documents.
void bind_transfer(nanobind::module_& m);

}  // namespace pdserve
