// The attention kernels of int8 rows, once for each instruction set. Each form of rows is a source
// of its own: of all together, GCC inlines too little.

#include "attend.h"

#include "../../isa/build_name.h"

namespace pdserve::attention {

const Kernels PDSERVE_OF_THIS_BUILD(Int8Kernels) = {
    kernels_of_types<float, Int8>(), kernels_of_types<BFloat16, Int8>()};

}  // namespace pdserve::attention
