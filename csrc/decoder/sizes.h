// The sizes of a model, as Python passes them.
#pragma once

#include <cstdint>

#include "../recurrent/launch.h"

namespace pdserve::decoder {

// Of latent attention: pdserve.engine.models.latent.LatentShape. Of each head, but for the ranks.
struct Latent {
    int64_t rank = 0;  // of the latent vector; 0: heads have keys and values of their own
    int64_t rope_dim = 0;
    int64_t nope_dim = 0;
    int64_t value_dim = 0;
    int64_t query_rank = 0;  // 0: queries are made of the residual stream
    float norm_eps = 0;

    int64_t query_dim() const { return nope_dim + rope_dim; }
};

// Those of one rank, where there are several: a stage has some of the layers, and a tensor-parallel
// rank a share of the heads, of the inner width and of the vocabulary.
struct Sizes {
    int64_t first_layer;     // of the stage, in the pool
    int64_t pool_layers;
    int64_t vocab;           // of the whole model
    int64_t first_token_id;  // of the rank's share
    int64_t num_token_ids;   // likewise
    int64_t hidden;
    int64_t num_heads;
    int64_t model_kv_heads;  // of the whole model: the pool has these
    int64_t first_kv_head;
    int64_t num_kv_heads;
    int64_t head_dim;  // of rows in the pool
    int64_t rope_dim;  // what is rotated of a head: all, but with latent attention
    Latent latent;
    bool norms_heads_together;  // all queries and all keys of a token; else each head
    recurrent::Shape recurrent{};  // of layers with a state; without groups: there are none
    bool gates_attention = false;  // rows of qkv have a gate for each number that attention makes

    // As the weights and other settings have them.
    int64_t num_ropes = 1;
    bool has_after_norms = false;
    int64_t inner = 0;        // of a row: the widest MLP, or the chosen experts of the widest layer
    int64_t num_experts = 0;  // most of a layer; 0: no layer has experts
    int64_t num_chosen = 0;   // likewise
    int64_t num_shared = 0;   // likewise: 0 or 1

    int64_t q_norm_size() const { return norms_heads_together ? query_width() : head_dim; }
    int64_t k_norm_size() const {
        return norms_heads_together ? num_kv_heads * head_dim : head_dim;
    }
    int64_t query_width() const { return num_heads * head_dim; }
    int64_t qkv_width() const {
        return is_latent() ? query_width() : (num_heads + 2 * num_kv_heads) * head_dim;
    }
    // Of qkv and what follows it.
    int64_t row_width() const { return qkv_width() + (gates_attention ? query_width() : 0); }
    bool is_latent() const { return latent.rank > 0; }
    bool has_states() const { return recurrent.num_groups > 0; }
    int64_t state_channels() const {  // of a token, that are convolved in all ranks
        return recurrent.model_groups
            * (2 * recurrent.key_dim + recurrent.group_size * recurrent.value_dim);
    }
    int64_t num_state_heads() const { return recurrent.num_groups * recurrent.group_size; }
    int64_t state_values() const { return num_state_heads() * recurrent.value_dim; }
    int64_t num_planes() const { return is_latent() ? 1 : 2; }  // of the pool
    // Of a token, that a mixer ends with.
    int64_t values_width() const { return is_latent() ? num_heads * latent.value_dim : query_width(); }
};

// Raises ValueError: they contradict each other.
void check_sizes(const Sizes& sizes);

// Raises ValueError: the pool has not all of the stage's layers with KV, of which there are so many.
void check_layers(const Sizes& sizes, int64_t num_with_kv);

// Raises ValueError: it is less, or absurdly large.
void check_at_least(const char* name, int64_t value, int64_t least);

}  // namespace pdserve::decoder
