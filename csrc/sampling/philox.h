// Random numbers that are a function of a key and a counter; pdserve/engine/sampling/uniform.py.
#pragma once

#include <cstdint>

namespace pdserve::sampling {

// In [0, 1), a multiple of 2**-52: the first words of Philox 4x32-10.
double uniform(uint64_t key, uint64_t counter);

}  // namespace pdserve::sampling
