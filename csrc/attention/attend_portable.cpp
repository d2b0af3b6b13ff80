// The attention kernels, compiled for the baseline of the target; flags are in CMakeLists.txt.

#include "attend.h"

namespace pdserve::attention {

const Kernels kPortableKernels = {attend<float>, attend<BFloat16>};

}  // namespace pdserve::attention
