// Asks cpuid (through the compiler's runtime, which also asks whether the OS saves the registers).

#include "cpu.h"

#include <string>

#include "tensor_view.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

struct Features {
    bool avx2 = false;  // with FMA, as our AVX2 kernels need both
    bool avx512f = false;  // with BW, DQ and VL
    bool avx512_bf16 = false;
    bool avx512_vnni = false;
};

Features read_features() {
    Features features;
#if defined(__x86_64__)
    __builtin_cpu_init();
    features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    features.avx512f = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    features.avx512_bf16 = features.avx512f && __builtin_cpu_supports("avx512bf16");
    features.avx512_vnni = features.avx512f && __builtin_cpu_supports("avx512vnni");
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
        case Variant::kAvx512Bf16: return "avx512_bf16";
        case Variant::kAvx512: return "avx512";
        case Variant::kAvx2: return "avx2";
        case Variant::kPortable: break;
    }
    return "portable";
}

bool can_run(Variant variant) {
    switch (variant) {
        case Variant::kAvx512Bf16: return features().avx512_bf16;
        case Variant::kAvx512: return features().avx512f;
        case Variant::kAvx2: return features().avx2;
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
