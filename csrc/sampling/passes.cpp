// The passes of sampling, once for each instruction set.

#include "passes.h"

#include "../isa/build_name.h"

namespace pdserve::sampling {

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {
    peak_of, mask, weigh, sum, block_maxima, collect, exp_sum, rank};

}  // namespace pdserve::sampling
