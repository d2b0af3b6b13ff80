// The attention kernels, compiled for AVX2 and FMA; flags are in CMakeLists.txt.

#include "attend.h"

namespace pdserve::attention {

const Kernels kAvx2Kernels = {attend<float>, attend<BFloat16>};

}  // namespace pdserve::attention
