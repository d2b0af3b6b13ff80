// The attention kernels, once for each instruction set.

#include "attend.h"

#include "../../isa/build_name.h"

namespace pdserve::attention {

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {
    kernels_of_type<float>(), kernels_of_type<BFloat16>()};

}  // namespace pdserve::attention
