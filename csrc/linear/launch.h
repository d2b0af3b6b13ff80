// Binds packed linear layers into pdserve._native.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_linear(nanobind::module_& m);

}  // namespace pdserve
