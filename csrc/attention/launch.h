// Binds the attention kernels into pdserve._native.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_attention(nanobind::module_& m);

}  // namespace pdserve
