// What Python sees of the CPU and of the threads. Apart from them, so that the kernels can be linked
// without Python.
#pragma once

#include <nanobind/nanobind.h>

#include "isa/cpu.h"

namespace pdserve {

// By name; "" is the best. Raises ValueError: no such variant, or not on this CPU.
Variant variant_from(const char* name);

void bind_cpu(nanobind::module_& m);
void bind_threads(nanobind::module_& m);
void bind_core_share(nanobind::module_& m);
void bind_watchdog(nanobind::module_& m);

}  // namespace pdserve
