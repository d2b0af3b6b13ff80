#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_recurrent(nanobind::module_& m);

}  // namespace pdserve
