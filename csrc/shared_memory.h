// Memory that processes share, mapped so that it can have huge pages.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_shared_memory(nanobind::module_& m);

}  // namespace pdserve
