// Checksums of scattered rows of bytes.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_checksum(nanobind::module_& m);

}  // namespace pdserve
