// Which instruction sets this CPU has, and which build of the kernels that selects.
#pragma once

namespace pdserve {

// Best first. Each is the same source compiled for another instruction set, but for kAmx: its
// products and attention of bfloat16 are sources of their own, and all else is kAvx512Bf16's.
// kNeonDot is kPortable, but for products of integers. kAmxEmulated does the same without AMX, on kPortable, slowly: for tests.
enum class Variant {
    kAmx, kAvx512Bf16, kAvx512, kAvx2, kNeonBf16, kNeonDot, kPortable, kAmxEmulated
};

constexpr Variant kVariants[] = {Variant::kAmx, Variant::kAvx512Bf16, Variant::kAvx512,
    Variant::kAvx2, Variant::kNeonBf16, Variant::kNeonDot, Variant::kPortable,
    Variant::kAmxEmulated};

const char* variant_name(Variant variant);
bool can_run(Variant variant);
Variant best_variant();  // decided once

// Instruction set extensions that matter to the kernels; those of other architectures are false.
struct Features {
    bool avx2 = false;     // with FMA, as our AVX2 kernels need both
    bool avx512f = false;  // with BW, DQ and VL
    bool avx512_bf16 = false;
    bool avx512_vnni = false;
    bool amx_bf16 = false;   // and the OS lets this process use tiles
    bool neon_bf16 = false;  // dot products of pairs of bfloat16
    bool neon_dot = false;   // dot products of 4 int8
    bool neon_i8mm = false;  // and of uint8 and int8
};

const Features& cpu_features();  // read once

}  // namespace pdserve
