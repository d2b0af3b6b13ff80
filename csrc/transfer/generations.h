// The writer's side of the seqlock by which readers of exported KV blocks notice that a block was
// reused.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_generations(nanobind::module_& m);

}  // namespace pdserve
