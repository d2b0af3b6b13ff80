// Kernels of rows of codes, as they are sent (row_codes.cpp).
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

namespace pdserve::attention {

struct RowCodeFunctions {
    // Whether the codes are the numbers, to the bit: if not, what is in `coded` is of no use.
    bool (*code)(const void* numbers, int64_t num_rows, int row_dim, void* coded);
    void (*decode)(const void* coded, int64_t num_rows, int row_dim, void* numbers);
};

struct RowCodesOf {
    RowCodeFunctions int8;
    RowCodeFunctions fp8;
};

struct RowCodeKernels {
    RowCodesOf float32;
    RowCodesOf bfloat16;
};

extern const RowCodeKernels kAvx512Bf16RowCodeKernels;
extern const RowCodeKernels kAvx512RowCodeKernels;
extern const RowCodeKernels kAvx2RowCodeKernels;
extern const RowCodeKernels kNeonBf16RowCodeKernels;
extern const RowCodeKernels kPortableRowCodeKernels;

}  // namespace pdserve::attention
