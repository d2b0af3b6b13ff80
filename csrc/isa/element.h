// Element types for which C++ has no built-in type.
//
// Included by translation units that are compiled for different instruction sets. So nothing here
// may be an inline function with external linkage: the linker keeps an arbitrary one of its copies,
// perhaps one that this CPU cannot execute.
#pragma once

#include <cstdint>

namespace pdserve {

struct BFloat16 {
    uint16_t bits;
};

// Codes of 8 bits: an integer of -127 to 127, and a float8 of 4 bits of exponent (e4m3, finite).
struct Int8 {
    int8_t code;
};

struct Fp8 {
    uint8_t code;
};

}  // namespace pdserve
