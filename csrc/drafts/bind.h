// What Python sees of drafts.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_drafts(nanobind::module_& m);

}  // namespace pdserve
