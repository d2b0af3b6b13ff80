// The product kernels, once for each instruction set.

#include "product.h"

#include "../../isa/build_name.h"
#include "convert.h"

namespace pdserve::linear {

const ProductKernels PDSERVE_OF_THIS_BUILD(ProductKernels) = {
#if defined(PDSERVE_HAS_PAIRS)
    .has_pairs = true,
#else
    .has_pairs = false,
#endif
    .float32_by_float32 = multiply_item<ReadFloat32>,
    .bfloat16_by_float32 = multiply_item<ReadBFloat16>,
    .int8_by_float32 = multiply_item<ReadInt8>,
#if defined(PDSERVE_HAS_PAIRS)
    .bfloat16_by_pairs = multiply_item<ReadBFloat16Pairs>,
    .int8_by_pairs = multiply_item<ReadInt8Pairs>,
#else
    .bfloat16_by_pairs = nullptr,
    .int8_by_pairs = nullptr,
#endif
    .widen_float32 = widen_rows<float>,
    .widen_bfloat16 = widen_rows<BFloat16>,
    .pad_pairs = pad_rows,
};

}  // namespace pdserve::linear
