// Asks cpuid (through the compiler's runtime, which also asks whether the OS saves the registers), or
// the kernel on Arm.

#include "cpu.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace pdserve {

namespace {

#if defined(__aarch64__)

// Bits of AT_HWCAP2, by the names that newer system headers give them.
constexpr unsigned long kHwcap2I8mm = 1ul << 13;
constexpr unsigned long kHwcap2Bf16 = 1ul << 14;

#endif

Features read_features() {
    Features features;
#if defined(__x86_64__)
    __builtin_cpu_init();
    features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    features.avx512f = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    features.avx512_bf16 = features.avx512f && __builtin_cpu_supports("avx512bf16");
    features.avx512_vnni = features.avx512f && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    const unsigned long hwcap2 = getauxval(AT_HWCAP2);
    features.neon_i8mm = (hwcap2 & kHwcap2I8mm) != 0;
    features.neon_bf16 = (hwcap2 & kHwcap2Bf16) != 0;
#endif
    return features;
}

}  // namespace

const Features& cpu_features() {
    static const Features result = read_features();
    return result;
}

const char* variant_name(Variant variant) {
    switch (variant) {
        case Variant::kAvx512Bf16: return "avx512_bf16";
        case Variant::kAvx512: return "avx512";
        case Variant::kAvx2: return "avx2";
        case Variant::kNeonBf16: return "neon_bf16";
        case Variant::kPortable: break;
    }
#if defined(__aarch64__)
    return "neon";  // which every such CPU has
#else
    return "portable";
#endif
}

bool can_run(Variant variant) {
    switch (variant) {
        case Variant::kAvx512Bf16: return cpu_features().avx512_bf16;
        case Variant::kAvx512: return cpu_features().avx512f;
        case Variant::kAvx2: return cpu_features().avx2;
        case Variant::kNeonBf16: return cpu_features().neon_bf16;
        case Variant::kPortable: break;
    }
    return true;
}

Variant best_variant() {
    static const Variant best = [] {
        for (Variant variant : kVariants) {
            if (can_run(variant)) return variant;
        }
        return Variant::kPortable;
    }();
    return best;
}

}  // namespace pdserve
