// Binds the decoder into pdserve._native.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_decoder(nanobind::module_& m);

}  // namespace pdserve
