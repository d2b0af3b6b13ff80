#include "latent_mixer.h"

#include "../rows/launch.h"

namespace pdserve::decoder {

using linear::Result;

void LatentMixer::write(const attention::Step& step, const attention::Pool& pool, int index,
    const Layer& layer, const Buffers& buffers, const Adapter* const* adapters) {
    const Latent& latent = model_.sizes.latent;
    const int64_t num_rows = step.num_tokens;
    const void* source = buffers.normed;
    if (latent.query_rank > 0) {
        products_.multiply(layer.query_latent, source, num_rows, Result::kStoreFloat,
            buffers.latent_rows, 0, adapters);
        rows::normalise({buffers.latent_rows, layer.query_latent_norm, latent.norm_eps,
                            latent.query_rank, buffers.latent_normed},
            num_rows, model_.is_bfloat16, variant_);
        source = buffers.latent_normed;
    }
    products_.multiply(
        layer.queries, source, num_rows, Result::kStore, buffers.head_rows, 0, adapters);
    multiply_heads(layer, &LatentHead::key, buffers.head_rows, latent.query_dim(), buffers.qkv,
        model_.sizes.head_dim, num_rows, adapters);
    products_.multiply(layer.latent, buffers.normed, num_rows, Result::kStoreFloat,
        buffers.latent_rows, 0, adapters);
    attention::store_latent(step, pool, index,
        {
            .rows = buffers.latent_rows,
            .norm = layer.latent_norm,
            .norm_eps = latent.norm_eps,
            .rank = static_cast<int>(latent.rank),
            .cos_sin = buffers.cos_sin + layer.rope * num_rows * model_.sizes.rope_dim,
            .made = buffers.latent_normed,
            .queries = buffers.head_rows,
            .is_bfloat16 = model_.is_bfloat16,
            .num_heads = static_cast<int>(model_.sizes.num_heads),
            .query_dim = static_cast<int>(latent.query_dim()),
            .turned = buffers.qkv,
        },
        variant_);
}

void LatentMixer::make_values(const Layer& layer, const Buffers& buffers, int64_t num_rows,
    const Adapter* const* adapters) {
    multiply_heads(layer, &LatentHead::value, buffers.attended, model_.sizes.head_dim,
        buffers.head_rows, model_.sizes.latent.value_dim, num_rows, adapters);
}

void LatentMixer::multiply_heads(const Layer& layer, linear::PackedMatrix LatentHead::*matrix,
    const void* x, int64_t x_dim, void* out, int64_t out_dim, int64_t num_rows,
    const Adapter* const* adapters) {
    const auto num_heads = static_cast<int64_t>(layer.heads.size());
    while (adapters != nullptr && static_cast<int64_t>(deltas_.size()) < num_heads) {
        deltas_.emplace_back(model_.is_bfloat16, variant_);
    }
    const size_t element_bytes = model_.is_bfloat16 ? 2 : 4;
    each_.clear();
    for (int64_t head = 0; head < num_heads; ++head) {
        const linear::PackedMatrix& own = layer.heads[head].*matrix;
        const char* const own_x = static_cast<const char*>(x) + head * x_dim * element_bytes;
        const int64_t x_stride = num_heads * x_dim;
        each_.push_back({
            .matrix = &own,
            .x = own_x,
            .is_bfloat16 = model_.is_bfloat16,
            .x_stride = x_stride,
            .num_rows = num_rows,
            .result = Result::kStore,
            .out = static_cast<char*>(out) + head * out_dim * element_bytes,
            .out_stride = num_heads * out_dim,
            .delta = adapters == nullptr
                ? linear::Delta{}
                : deltas_[head].of(own, own_x, num_rows, adapters, x_stride),
        });
    }
    linear::multiply_all(each_.data(), each_.size(), variant_);
}

}  // namespace pdserve::decoder
