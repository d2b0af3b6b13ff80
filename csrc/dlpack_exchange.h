// The part of DLPack 1.x that nanobind has no declaration for: the C exchange API, found on a
// tensor *type* as the capsule __dlpack_c_exchange_api__. Layout as the DLPack project has it.
#pragma once

#include <cstdint>

#include <nanobind/ndarray.h>

namespace pdserve::dlpack {

struct ExchangeApiHeader {
    uint32_t major_version;
    uint32_t minor_version;
    ExchangeApiHeader* previous;
};

struct ExchangeApi {
    ExchangeApiHeader header;
    void* managed_tensor_allocator;
    void* managed_tensor_from_object;
    void* managed_tensor_to_object;
    // Fills in a description borrowed from the object; non-zero with a Python error set on failure.
    int (*tensor_from_object)(void* object, nanobind::dlpack::dltensor* out);
    void* current_work_stream;
};

// The API of an object's type, or null. Asked once per type.
const ExchangeApi* exchange_api(nanobind::handle object);

}  // namespace pdserve::dlpack
