// The same kernel source is compiled once for each instruction set (kernel_source in
// csrc/kernels.cmake).
//
// A kernel source ends with a table of its functions, named after the build. A launcher picks one:
//     const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {...};     // for example kAvx2Kernels
//     const Kernels& kernels = PDSERVE_OF_VARIANT(variant, Kernels);
#pragma once

#define PDSERVE_JOIN(a, b, c) a##b##c
#define PDSERVE_JOIN_EXPANDED(a, b, c) PDSERVE_JOIN(a, b, c)
#define PDSERVE_OF_THIS_BUILD(name) PDSERVE_JOIN_EXPANDED(k, PDSERVE_BUILD, name)

#if defined(__x86_64__)
#define PDSERVE_OF_VARIANT(variant, name)                           \
    ((variant) == ::pdserve::Variant::kAmx                 ? kAvx512Bf16##name \
            : (variant) == ::pdserve::Variant::kAvx512Bf16 ? kAvx512Bf16##name \
            : (variant) == ::pdserve::Variant::kAvx512 ? kAvx512##name \
            : (variant) == ::pdserve::Variant::kAvx2   ? kAvx2##name   \
                                                       : kPortable##name)
#elif defined(__aarch64__)
#define PDSERVE_OF_VARIANT(variant, name) \
    ((variant) == ::pdserve::Variant::kNeonBf16 ? kNeonBf16##name : kPortable##name)
#else
#define PDSERVE_OF_VARIANT(variant, name) kPortable##name
#endif
