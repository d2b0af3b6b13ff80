// The attention kernels, once for each instruction set. Each form of rows is a source
// of its own: of all together, GCC inlines too little.

#include "attend.h"

#include "../../isa/build_name.h"

namespace pdserve::attention {

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {
    kernels_of_types<float, float>(), kernels_of_types<BFloat16, BFloat16>()};

}  // namespace pdserve::attention
