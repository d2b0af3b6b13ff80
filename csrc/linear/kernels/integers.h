// Products of integers: of codes (../coding.h) and of x, which becomes integers too.
//
// 16 inputs of a row share a scale: x ~ scale * q, with |q| <= 127. Where the largest of 32 is far
// above what is usual in the row (kFarAbove times the mean of its blocks' largest), those beside it
// would lose their digits: then |q| <= 32639. Such blocks are few. Sums of code * q over 16 inputs are
// exact, so they do not depend on order and instruction set. What follows in float32 has one order
// and is never fused:
//     half = float(sum of (code - zero) * q over 16 inputs) * scale of x
//     y += (half + half') * scale of weights - minimum * sum of x      over 32 inputs
// or, where 16 inputs have a scale of weights of their own,
//     y += half * scale + half' * scale' - (minimum * sum of x + minimum' * sum' of x)
// So a result has the same bits in all builds, whatever is computed beside it.
//
// No inline functions with external linkage here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace pdserve::linear {

constexpr float kFarAbove = 1.5f;

// The numbers of 32 inputs of a row.
struct BlockNumbers {
    float scales[2];       // of 16 inputs each
    int32_t zero_sums[2];  // of -zero * q
    float sums[2];         // of scale * q
    float sum;             // of both
    int32_t is_wide;       // has 16 bits
};

// Of 32 inputs: 2 bytes each, and the numbers.
constexpr int kRowBlockBytes = 2 * kBlockInputs + static_cast<int>(sizeof(BlockNumbers));

// `zero`: of the codes that it will be multiplied by. target: [rows.count][padded / 32] blocks.
using QuantiseFunction = void (*)(
    const Rows& rows, int64_t num_in, int64_t padded, int zero, void* target);

struct IntegerKernels {
    MultiplyFunction multiply;
    QuantiseFunction quantise;  // rows of bfloat16
};

extern const IntegerKernels kAvx512VnniIntegerKernels;
extern const IntegerKernels kAvx2IntegerKernels;
extern const IntegerKernels kPortableIntegerKernels;

}  // namespace pdserve::linear
