// Latent attention (MLA), but for the attention itself: one row is kept of a token, and each head's
// key and value are taken in by what is multiplied with rows and made of them (absorbed).
#pragma once

#include <cstdint>
#include <vector>

#include "../attention/layer.h"
#include "../isa/cpu.h"
#include "../linear/linear.h"
#include "buffers.h"
#include "model.h"
#include "products.h"

namespace pdserve::decoder {

class LatentMixer {
public:
    LatentMixer(const Model& model, Variant variant)
        : model_(model), variant_(variant), products_(model.is_bfloat16, variant) {}

    // Of buffers.normed: rows, which are stored, and queries for them in buffers.qkv. `adapters`:
    // of each row, or null; null: no row has one.
    void write(const attention::Step& step, const attention::Pool& pool, int index,
        const Layer& layer, const Buffers& buffers, const Adapter* const* adapters);

    // Of latent vectors in buffers.attended: values of heads, in buffers.head_rows.
    void make_values(const Layer& layer, const Buffers& buffers, int64_t num_rows,
        const Adapter* const* adapters);

private:
    // x and out are [num_rows, num_heads] of so many elements, of which a head's matrix takes and
    // makes the first ones.
    void multiply_heads(const Layer& layer, linear::PackedMatrix LatentHead::*matrix,
        const void* x, int64_t x_dim, void* out, int64_t out_dim, int64_t num_rows,
        const Adapter* const* adapters);

    const Model& model_;
    const Variant variant_;
    const Products products_;
    std::vector<linear::Product> each_;  // head's
    std::vector<Deltas> deltas_;         // likewise, once a row has an adapter
};

}  // namespace pdserve::decoder
