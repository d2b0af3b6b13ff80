// The attention kernels of fp8 rows, once for each instruction set. Each form of rows is a source
// of its own: of all together, GCC inlines too little.

#include "attend.h"

#include "../../isa/build_name.h"

namespace pdserve::attention {

const Kernels PDSERVE_OF_THIS_BUILD(Fp8Kernels) = {
    kernels_of_types<float, Fp8>(), kernels_of_types<BFloat16, Fp8>()};

}  // namespace pdserve::attention
