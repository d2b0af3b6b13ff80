// Reads an adapter from Python: NativeAdapter (pdserve/engine/native/adapters.py).
#pragma once

#include <vector>

#include <nanobind/nanobind.h>

#include "../model.h"
#include "adapter.h"

namespace pdserve::decoder {

// An adapter that owns references to its tensors. To be released with the interpreter lock held.
struct OwnedAdapter {
    Adapter adapter;
    std::vector<nanobind::object> owners;
};

// The adapter points to matrices of the model, which must stay where it is.
// Raises TypeError or ValueError: a tensor of the wrong dtype or shape, or no such matrix.
OwnedAdapter read_adapter(nanobind::handle object, const Model& model);

}  // namespace pdserve::decoder
