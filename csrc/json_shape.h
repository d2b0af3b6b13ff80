// Measures the size of a JSON text before it is parsed.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_json_shape(nanobind::module_& m);

}  // namespace pdserve
