// The attention kernels, compiled for AVX-512 with BF16 dot products; flags are in CMakeLists.txt.

#include "attend.h"

namespace pdserve::attention {

const Kernels kAvx512Bf16Kernels = {attend<float>, attend<BFloat16>};

}  // namespace pdserve::attention
