// What Python sees of streams of tokens.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_streams(nanobind::module_& m);

}  // namespace pdserve
