#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_places(nanobind::module_& m);

}  // namespace pdserve
