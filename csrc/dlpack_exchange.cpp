// Looks up a tensor type's C exchange API, and remembers the answer for the last type seen.

#include "dlpack_exchange.h"

namespace nb = nanobind;

namespace pdserve::dlpack {

namespace {

constexpr uint32_t kMajorVersion = 1;

const ExchangeApi* look_up(nb::handle type) {
    nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
        return nullptr;
    }
    void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    // A newer producer may offer older tables behind its own.
    for (auto* header = static_cast<ExchangeApiHeader*>(pointer); header != nullptr;
         header = header->previous) {
        if (header->major_version == kMajorVersion) {
            auto* api = reinterpret_cast<const ExchangeApi*>(header);
            return api->tensor_from_object != nullptr ? api : nullptr;
        }
    }
    return nullptr;
}

}  // namespace

const ExchangeApi* exchange_api(nb::handle object) {
    // Only used with the GIL held. The type is kept alive, so its address is not reused.
    static nb::object* known_type = new nb::object();
    static const ExchangeApi* known_api = nullptr;
    nb::handle type = object.type();
    if (!type.is(*known_type)) {
        known_api = look_up(type);
        *known_type = nb::borrow(type);
    }
    return known_api;
}

}  // namespace pdserve::dlpack
