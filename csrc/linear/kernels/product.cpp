// The product kernels, once for each instruction set.

#include "product.h"

#include "../../isa/build_name.h"
#include "convert.h"
#include "widen.h"

namespace pdserve::linear {

const ProductKernels PDSERVE_OF_THIS_BUILD(ProductKernels) = {
    .by_float32 = {multiply_item<ReadFloat32>, multiply_item<ReadBFloat16>,
        multiply_item<ReadBytes<WeightType::kInt8>>, multiply_item<ReadBytes<WeightType::kFp8>>},
#if defined(PDSERVE_HAS_PAIRS)
    .by_pairs = {nullptr, multiply_item<ReadBFloat16Pairs>, nullptr,
        multiply_item<ReadBytePairs<WeightType::kFp8>>},
#else
    .by_pairs = {},
#endif
    .widen_float32 = widen_rows<float>,
    .widen_bfloat16 = widen_rows<BFloat16>,
    .pad_pairs = pad_rows,
    .widen_codes = widen_codes,
};

}  // namespace pdserve::linear
