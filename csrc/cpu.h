// Which instruction sets this CPU has, and which build of the kernels that selects.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Best first. Each is the same source compiled for another instruction set.
enum class Variant { kAvx512Bf16, kAvx512, kAvx2, kPortable };

constexpr Variant kVariants[] = {
    Variant::kAvx512Bf16, Variant::kAvx512, Variant::kAvx2, Variant::kPortable};

const char* variant_name(Variant variant);
bool can_run(Variant variant);
Variant best_variant();  // decided once

// By name; "" is the best. Raises ValueError: no such variant, or not on this CPU.
Variant variant_from(const char* name);

void bind_cpu(nanobind::module_& m);

}  // namespace pdserve
