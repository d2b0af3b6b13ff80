// The router's arithmetic over all nodes, a few microseconds per decision.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_routing(nanobind::module_& m);

}  // namespace pdserve
