// Asks cpuid (through the compiler's runtime, which also asks whether the OS saves the registers).

#include "cpu.h"

#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "tensor_view.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

struct Features {
    bool avx2 = false;  // with FMA, as our AVX2 kernels need both
    bool avx512f = false;  // with BW, DQ and VL
    bool avx512_bf16 = false;
    bool avx512_vnni = false;
    bool amx_bf16 = false;  // and the OS lets this process use tiles
};

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
    features.avx512_bf16 = features.avx512f && __builtin_cpu_supports("avx512bf16");
    features.avx512_vnni = features.avx512f && __builtin_cpu_supports("avx512vnni");
    features.amx_bf16 = features.avx512_bf16 && has_amx_bf16() && may_use_tiles();
#endif
    return features;
}

const Features& features() {
    static const Features result = read_features();
    return result;
}

}  // namespace

const char* variant_name(Variant variant) {
    switch (variant) {
        case Variant::kAmx: return "amx";
        case Variant::kAmxEmulated: return "amx_emulated";
        case Variant::kAvx512Bf16: return "avx512_bf16";
        case Variant::kAvx512: return "avx512";
        case Variant::kAvx2: return "avx2";
        case Variant::kPortable: break;
    }
    return "portable";
}

bool can_run(Variant variant) {
    switch (variant) {
        case Variant::kAmx: return features().amx_bf16;
        case Variant::kAvx512Bf16: return features().avx512_bf16;
        case Variant::kAvx512: return features().avx512f;
        case Variant::kAvx2: return features().avx2;
        case Variant::kPortable:
        case Variant::kAmxEmulated: break;
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

Variant variant_from(const char* name) {
    if (*name == '\0') return best_variant();
    std::string runnable;
    for (Variant variant : kVariants) {
        if (!can_run(variant)) continue;
        if (std::string(name) == variant_name(variant)) return variant;
        runnable += (runnable.empty() ? "" : ", ") + std::string(variant_name(variant));
    }
    raise_value_error("variant", "one of " + runnable + " on this CPU", name);
}

void bind_cpu(nb::module_& m) {
    m.def(
        "cpu_features",
        [] {
            nb::dict result;
            result["avx2"] = features().avx2;
            result["avx512f"] = features().avx512f;
            result["avx512_bf16"] = features().avx512_bf16;
            result["avx512_vnni"] = features().avx512_vnni;
            result["amx_bf16"] = features().amx_bf16;
            return result;
        },
        "Instruction set extensions of this CPU that matter to the kernels.");
    m.def(
        "kernel_variants",
        [] {
            nb::list result;
            for (Variant variant : kVariants) {
                if (can_run(variant)) result.append(nb::str(variant_name(variant)));
            }
            return result;
        },
        "The kernel builds this CPU can run, best first; the first is used.");
}

}  // namespace pdserve
