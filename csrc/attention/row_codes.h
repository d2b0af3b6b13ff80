// Codes the rows of a pool that rounds what it stores, and decodes them.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Adds code_rows and decode_rows; pdserve/_native.pyi documents them.
void bind_row_codes(nanobind::module_& m);

}  // namespace pdserve
