// Element types that C++ has no name for.
//
// Included by translation units compiled for different instruction sets. So nothing here may be an
// inline function with external linkage: the linker would keep any one copy of it, perhaps one that
// this CPU cannot run.
#pragma once

#include <cstdint>

namespace pdserve {

struct BFloat16 {
    uint16_t bits;
};

}  // namespace pdserve
