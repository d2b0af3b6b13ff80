// Which instruction sets this CPU has, and which build of the kernels that selects.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Best first. Each is the same source compiled for another instruction set, but for kAmx: its
// products and attention of bfloat16 are sources of their own, and all else is kAvx512Bf16's.
// kAmxEmulated does the same without AMX, on kPortable, slowly: for tests.
enum class Variant { kAmx, kAvx512Bf16, kAvx512, kAvx2, kPortable, kAmxEmulated };

constexpr Variant kVariants[] = {Variant::kAmx, Variant::kAvx512Bf16, Variant::kAvx512,
    Variant::kAvx2, Variant::kPortable, Variant::kAmxEmulated};

const char* variant_name(Variant variant);
bool can_run(Variant variant);
Variant best_variant();  // decided once

// By name; "" is the best. Raises ValueError: no such variant, or not on this CPU.
Variant variant_from(const char* name);

void bind_cpu(nanobind::module_& m);

}  // namespace pdserve
