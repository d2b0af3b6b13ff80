// Sums over blocks of KV, by themselves or as they are copied.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Adds copy_summed, sum_blocks and find_wrong; pdserve/_native.pyi documents them.
void bind_checksum(nanobind::module_& m);

}  // namespace pdserve
