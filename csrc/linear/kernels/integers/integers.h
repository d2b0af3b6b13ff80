// Products of integers: of codes (../coding.h) and of x, which becomes integers too.
//
// A row has one scale: x ~ scale * q, and the largest |q| is 32639. So the sums of code * q over all
// inputs that share a scale of weights are integers: exact, whatever the order and the instruction
// set. Tiles (amx_integers.cpp) take the 16 bits of q as two bytes. To have no more than one for most
// inputs elsewhere, 16 inputs have a multiplier: q = multiplier * p, with |p| <= 127. Where the
// largest of 32 is far above what is usual in the row (kFarAbove times the mean of its blocks'
// largest), those beside it would lose their digits: there q has all 16 bits. Such blocks are few.
// What follows in float32 has one order and is never fused: for each group of inputs with a scale
//     y -= minimum * (sum of q over 32 inputs, or 16 if they have a scale of their own)
//     y += float(sum of (code - zero) * q over the group) * scale of weights
// Nested codes are 8 bits, scale * code - minimum, of which 256 have a scale.
// Without groups, it is y += float(sum) for each kUnscaledInputs, as many as 32 bits hold. At last
// y is multiplied by the row's scale. So a result has the same bits in all builds, whatever is
// computed beside it.
//
// No inline functions with external linkage here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "../kernel.h"

namespace pdserve::linear {

constexpr float kFarAbove = 1.5f;

constexpr int kUnscaledInputs = 512;

// Of q and p, the multiplier of the row's largest being kMostQ / kMostP.
constexpr int kMostQ = 32639;
constexpr int kMostP = 127;

// The numbers of 32 inputs of a row.
struct BlockNumbers {
    int32_t multipliers[2];  // of 16 inputs each; of 16 bits: 1
    int32_t zero_sums[2];    // of -zero times what is kept of each input: p or q; zero is less by
                             // what codes are less by (dot.h)
    float sums[2];           // of q
    float sum;               // of both
    int32_t is_wide;         // has 16 bits
};

// Of 32 inputs: 2 bytes each, and the numbers.
constexpr int kRowBlockBytes = 2 * kBlockInputs + static_cast<int>(sizeof(BlockNumbers));

// Behind all blocks of a row: its scale, of float32.
constexpr int kRowEndBytes = 32;

// `zero`: of the codes that it will be multiplied by. target: rows of padded / 32 blocks.
using QuantiseFunction = void (*)(
    const Rows& rows, int64_t num_in, int64_t padded, int zero, void* target);

struct IntegerKernels {
    MultiplyFunction multiply;
    QuantiseFunction quantise;  // rows of bfloat16
};

// Products of integers through tiles. An item begins with a whole tile of rows.
struct IntegerTileKernels {
    MultiplyFunction multiply;
    QuantiseFunction tile_rows;  // of up to 16 rows
    int64_t (*row_bytes)(int64_t num_inputs);      // of them, each
    int64_t (*scratch_bytes)(int64_t num_inputs);  // of an item
    int64_t fewest_rows;  // with fewer, vectors are as fast
};

extern const IntegerTileKernels kAmxCodeTileKernels;
extern const IntegerTileKernels kAmxEmulatedCodeTileKernels;
extern const IntegerTileKernels kAmxIntegerTileKernels;
extern const IntegerTileKernels kAmxEmulatedIntegerTileKernels;
extern const IntegerTileKernels kAmxNestedTileKernels;
extern const IntegerTileKernels kAmxEmulatedNestedTileKernels;

extern const IntegerKernels kAvx512VnniIntegerKernels;
extern const IntegerKernels kAvx2IntegerKernels;
extern const IntegerKernels kNeonDotIntegerKernels;
extern const IntegerKernels kNeonI8mmIntegerKernels;
extern const IntegerKernels kPortableIntegerKernels;

}  // namespace pdserve::linear
