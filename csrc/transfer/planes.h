// Planes of the bytes of numbers, apart: what a lossless codec of KV can do something with.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Adds split_planes and join_planes; pdserve/_native.pyi documents them.
void bind_planes(nanobind::module_& m);

}  // namespace pdserve
