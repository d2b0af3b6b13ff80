// The attention kernels, compiled for AVX-512; flags are in CMakeLists.txt.

#include "attend.h"

namespace pdserve::attention {

const Kernels kAvx512Kernels = {attend<float>, attend<BFloat16>};

}  // namespace pdserve::attention
