// The arguments of the row kernels. No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "../isa/element.h"

namespace pdserve::rows {

// RMSNorm: scales rows of x [num_rows, size] to a root mean square of 1, then by `weight`. Rounds
// once, at the end.
struct Norm {
    const float* x;  // [num_rows, size], contiguous
    const float* weight;  // [size]
    float eps;
    int64_t size;
    void* out;  // [num_rows, size], contiguous, bfloat16 or float32
    float scale = 1.0f;    // of the result
    bool centres = false;  // subtracts the mean first
};

// Copies rows of a table, widened to float32 and scaled.
struct Lookup {
    const void* table;  // [num_entries, size], contiguous, bfloat16 or float32
    const int64_t* ids;  // [num_rows], all below num_entries
    int64_t size;
    float scale;
    float* out;  // [num_rows, size], contiguous
};

// Keeps numbers within a cap: x becomes cap * tanh(x / cap).
struct Cap {
    float* x;  // [num_rows, size]
    int64_t stride;  // between rows
    int64_t size;
    float cap;
};

// Multiplies rows of x [num_rows, size], contiguous, by a sigmoid of their gates. Both are of one
// type, bfloat16 or float32.
struct Weigh {
    const void* gates;  // [num_rows, size]
    int64_t stride;     // between rows of gates
    void* x;
    int64_t size;
};

// Processes the rows [first, last).
using NormFunction = void (*)(const Norm& norm, int64_t first, int64_t last);
using LookupFunction = void (*)(const Lookup& lookup, int64_t first, int64_t last);
using WeighFunction = void (*)(const Weigh& weigh, int64_t first, int64_t last);
using CapFunction = void (*)(const Cap& cap, int64_t first, int64_t last);

struct Kernels {
    NormFunction norm_to_float32;
    NormFunction norm_to_bfloat16;
    NormFunction round_to_float32;  // only copies
    NormFunction round_to_bfloat16;
    NormFunction add_norm;  // adds to `out`, which is float32
    LookupFunction look_up_float32;
    LookupFunction look_up_bfloat16;
    CapFunction cap;
    WeighFunction weigh_float32;
    WeighFunction weigh_bfloat16;
};

extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kNeonBf16Kernels;
extern const Kernels kPortableKernels;

}  // namespace pdserve::rows
