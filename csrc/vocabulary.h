// Vocabularies of hundreds of thousands of tokens: reads them, and finds which pairs are one.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_vocabulary(nanobind::module_& m);

}  // namespace pdserve
