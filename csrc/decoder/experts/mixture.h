// The experts of a layer: each computes the rows that have chosen it, and a row becomes the weighted
// sum of what its experts make of it.
#pragma once

#include <cstdint>
#include <vector>

#include "../../isa/cpu.h"
#include "../../linear/linear.h"
#include "../buffers.h"
#include "expert_choice.h"
#include "../model.h"
#include "../products.h"

namespace pdserve::decoder {

class Mixture {
public:
    Mixture(const Model& model, Variant variant)
        : model_(model), variant_(variant), products_(model.is_bfloat16, variant) {}

    // Chooses the experts of buffers.normed [num_rows, hidden], and lets them compute.
    // `adapters`: as of Products.
    void compute(const Experts& experts, const Buffers& buffers, int64_t num_rows,
        const Adapter* const* adapters);

    // Writes the sums of `num_rows` of these rows to out [num_rows, hidden], or adds them. A row's
    // experts are summed in ascending order, and the shared one last, so its bits do not depend on
    // other rows.
    void sum(const Experts& experts, const Buffers& buffers, int64_t first_row, int64_t num_rows, linear::Result result,
        float* out) const;

private:
    void share(const Experts& experts, const Buffers& buffers, int64_t num_rows,
        const Adapter* const* adapters);
    void gather(const Buffers& buffers, int64_t num_rows);
    linear::Delta adapt(const Experts& experts, linear::PackedMatrix Mlp::*matrix, const void* x,
        int64_t num_rows, const Adapter* const* adapters);
    void multiply(const Experts& experts, linear::PackedMatrix Mlp::*matrix, const Buffers& buffers,
        int64_t num_rows, const Adapter* const* adapters);

    const Model& model_;
    const Variant variant_;
    const Products products_;
    ExpertChoice choice_;
    std::vector<linear::Product> each_;  // expert's
};

}  // namespace pdserve::decoder
