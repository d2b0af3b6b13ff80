// The router's arithmetic over all nodes, which a decision does in microseconds.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_routing(nanobind::module_& m);

}  // namespace pdserve
