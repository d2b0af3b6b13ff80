// What the kernels have in common that store rows of KV.
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "../../../isa/element.h"

namespace pdserve::attention {

// Where the rows of one layer are stored. Strides are in elements. All fields have been checked.
struct StoredTo {
    void* layer_pool;  // as in Call
    int64_t block_stride;
    int64_t row_elements;
    int block_size;
    const int64_t* slots;  // [num_tokens]
};

// Processes tokens [first, last).
template <class Call>
using StoreFunction = void (*)(const Call& call, int64_t first, int64_t last);

// For activations of one type, by what the pool stores.
template <class Call>
struct StoreFunctions {
    StoreFunction<Call> plain;
    StoreFunction<Call> int8;
    StoreFunction<Call> fp8;
    StoreFunction<Call> rounded_int8;
    StoreFunction<Call> rounded_fp8;
};

template <class Call>
struct StoreKernels {
    StoreFunctions<Call> float32;
    StoreFunctions<Call> bfloat16;
};

}  // namespace pdserve::attention
