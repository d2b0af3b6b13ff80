// How much there is in a JSON text, before anything is made of it.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_json_shape(nanobind::module_& m);

}  // namespace pdserve
