// The writer's side of the seqlock that tells readers of exported KV blocks that a block changed
// hands.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_generations(nanobind::module_& m);

}  // namespace pdserve
