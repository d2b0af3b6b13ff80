// Asks cpuid (through the compiler's runtime, which also asks whether the OS saves the registers), or
// the kernel on Arm.

#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace pdserve {

namespace {

#if defined(__aarch64__)

// Bits of AT_HWCAP and AT_HWCAP2, by the names that newer system headers give them.
constexpr unsigned long kHwcapAsimddp = 1ul << 20;
constexpr unsigned long kHwcap2I8mm = 1ul << 13;
constexpr unsigned long kHwcap2Bf16 = 1ul << 14;

#endif

#if defined(__x86_64__)
bool has_amx_bf16() {
    unsigned a, b, c, d;
    constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTile) != 0 && (d & kBf16) != 0;
}

// Asks the kernel for the memory in which it saves tiles; for all threads, once.
bool may_use_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Features read_features() {
    Features features;
#if defined(__x86_64__)
    __builtin_cpu_init();
    features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    features.avx512f = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    // All CPUs with BF16 have VBMI, but for one generation (Cooper Lake).
    features.avx512_vnni = features.avx512f && __builtin_cpu_supports("avx512vnni");
    features.avx512_bf16 = features.avx512_vnni && __builtin_cpu_supports("avx512bf16")
        && __builtin_cpu_supports("avx512vbmi");
    features.amx_bf16 = features.avx512_bf16 && has_amx_bf16() && may_use_tiles();
#elif defined(__aarch64__)
    const unsigned long hwcap2 = getauxval(AT_HWCAP2);
    features.neon_dot = (getauxval(AT_HWCAP) & kHwcapAsimddp) != 0;
    features.neon_i8mm = features.neon_dot && (hwcap2 & kHwcap2I8mm) != 0;
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
        case Variant::kAmx: return "amx";
        case Variant::kAmxEmulated: return "amx_emulated";
        case Variant::kAvx512Bf16: return "avx512_bf16";
        case Variant::kAvx512: return "avx512";
        case Variant::kAvx2: return "avx2";
        case Variant::kNeonBf16: return "neon_bf16";
        case Variant::kNeonDot: return "neon_dot";
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
        case Variant::kAmx: return cpu_features().amx_bf16;
        case Variant::kAvx512Bf16: return cpu_features().avx512_bf16;
        case Variant::kAvx512: return cpu_features().avx512f;
        case Variant::kAvx2: return cpu_features().avx2;
        case Variant::kNeonBf16: return cpu_features().neon_bf16;
        case Variant::kNeonDot: return cpu_features().neon_dot;
        case Variant::kPortable: break;
        case Variant::kAmxEmulated:
#if defined(__x86_64__)
            break;
#else
            return false;
#endif
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
