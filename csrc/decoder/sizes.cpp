#include "sizes.h"

#include <string>

#include "../tensor_view.h"

namespace pdserve::decoder {

namespace {

void check_share(const char* name, int64_t first, int64_t count, int64_t total) {
    if (first < 0 || first > total - count) {
        raise_value_error(name,
            "a share of " + std::to_string(count) + " within " + std::to_string(total),
            std::to_string(first));
    }
}

void check_latent(const Sizes& sizes) {
    const Latent& latent = sizes.latent;
    check_at_least("latent.rope_dim", latent.rope_dim, 2);
    check_at_least("latent.nope_dim", latent.nope_dim, 1);
    check_at_least("latent.value_dim", latent.value_dim, 1);
    check_at_least("latent.query_rank", latent.query_rank, 0);
    if (latent.rank + latent.rope_dim != sizes.head_dim || sizes.model_kv_heads != 1) {
        raise_value_error("latent", "one KV head, of rank + rope_dim", "otherwise");
    }
}

void check_recurrent(const recurrent::Shape& shape) {
    check_at_least("recurrent.num_groups", shape.num_groups, 1);
    check_at_least("recurrent.group_size", shape.group_size, 1);
    check_at_least("recurrent.key_dim", shape.key_dim, 1);
    check_at_least("recurrent.value_dim", shape.value_dim, 1);
    check_at_least("recurrent.kernel", shape.kernel, 2);
    check_share("first_group", shape.first_group, shape.num_groups, shape.model_groups);
}

}  // namespace

void check_at_least(const char* name, int64_t value, int64_t least) {
    if (value < least || value > INT32_MAX) {
        raise_value_error(name, std::to_string(least) + " or more", std::to_string(value));
    }
}

void check_layers(const Sizes& sizes, int64_t num_with_kv) {
    check_share("first_layer", sizes.first_layer, num_with_kv, sizes.pool_layers);
}

void check_sizes(const Sizes& sizes) {
    check_at_least("num_kv_heads", sizes.num_kv_heads, 1);
    check_at_least("num_heads", sizes.num_heads, 1);
    check_at_least("head_dim", sizes.head_dim, 2);
    check_at_least("hidden_size", sizes.hidden, 1);
    if (sizes.num_heads % sizes.num_kv_heads != 0) {
        raise_value_error("num_heads",
            "a multiple of " + std::to_string(sizes.num_kv_heads) + " KV heads",
            std::to_string(sizes.num_heads));
    }
    if (sizes.rope_dim % 2 != 0) {
        const char* name = sizes.is_latent() ? "rope_dim" : "head_dim";
        raise_value_error(name, "an even number", std::to_string(sizes.rope_dim));
    }
    if (sizes.is_latent()) check_latent(sizes);
    check_share("first_token_id", sizes.first_token_id, sizes.num_token_ids, sizes.vocab);
    check_share("first_kv_head", sizes.first_kv_head, sizes.num_kv_heads, sizes.model_kv_heads);
    if (sizes.has_states()) check_recurrent(sizes.recurrent);
}

}  // namespace pdserve::decoder
