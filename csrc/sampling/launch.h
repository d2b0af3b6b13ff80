// Binds sampling into pdserve._native.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_sampling(nanobind::module_& m);

}  // namespace pdserve
