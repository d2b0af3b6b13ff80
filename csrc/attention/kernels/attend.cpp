// The attention kernels, once for each instruction set.

#include "attend.h"

#include "../../isa/build_name.h"

namespace pdserve::attention {

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {
    {attend<float>, fold_states<float>}, {attend<BFloat16>, fold_states<BFloat16>}};

}  // namespace pdserve::attention
