// Finds the pairs of tokens that are a token together.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_token_pairs(nanobind::module_& m);

}  // namespace pdserve
