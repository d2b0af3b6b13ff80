// Reads a Python object like pdserve.engine.native.linear.PackedLinear, and checks it.
#pragma once

#include <nanobind/nanobind.h>

#include "../tensor_view.h"
#include "linear.h"

namespace pdserve::linear {

// A matrix, with the tensors that it points into: changes to the Python object it was read from do
// not affect it. Like any references, the tensors must be released with the interpreter lock held.
struct OwnedMatrix {
    PackedMatrix matrix;
    nanobind::object weights;
    nanobind::object scales;  // or None
    nanobind::object bias;    // or None
};

// `name` is for errors.
// Raises TypeError or ValueError: a tensor is missing, not a CPU tensor, of a wrong dtype or size,
// or not aligned.
OwnedMatrix read_packed(
    nanobind::handle object, const char* name, Access access = Access::kRead);

// Sets type and coding. Raises ValueError: there is no such form, or it does not fit the sizes.
void read_form(nanobind::handle form, PackedMatrix& matrix);

// Bytes of a packed matrix, of which form and sizes are known.
int64_t packed_bytes(const PackedMatrix& matrix);

// Its outputs, padded to whole panels.
int64_t num_lanes_of(const PackedMatrix& matrix);

// Raises ValueError: impossible sizes.
void check_sizes(int64_t num_out, int64_t num_in, bool is_gated);

}  // namespace pdserve::linear
