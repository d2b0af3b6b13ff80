// A model as the forward pass sees it: sizes, and pointers into tensors that Python holds.
#pragma once

#include <cstdint>
#include <vector>

#include "../linear/linear.h"
#include "sizes.h"

namespace pdserve::decoder {

struct Mlp {
    linear::PackedMatrix gate_up;  // [2 * inner, hidden], gated
    linear::PackedMatrix down;     // [hidden, inner]

    int64_t inner() const { return down.num_in; }
};

// pdserve.engine.models.expert_config.Choice.
struct Choice {
    bool is_sigmoid;  // of scores; else weights are softmax values
    int64_t num_groups;
    int64_t num_chosen_groups;
    int64_t best_of_group;
    double weight_scale;
};

// A mixture of experts: the router scores the rows for each, and the best ones compute it.
struct Experts {
    linear::PackedMatrix router;  // [num_experts, hidden], float32
    std::vector<Mlp> mlps;        // of one size; none: the layer has an MLP
    Mlp shared;                   // of all rows; without weights: there is none
    // [1, hidden], float32, of a sigmoid that weighs it; without weights: it is not weighed.
    linear::PackedMatrix shared_weight;
    int64_t num_chosen;           // of a row
    bool normalizes_weights;      // those of the chosen ones add up to 1
    Choice choice;
    const float* score_bias;      // [num_experts]; null: none

    int64_t count() const { return static_cast<int64_t>(mlps.size()); }
    int64_t inner() const { return mlps.front().inner(); }
    bool has_shared() const { return shared.down.weights != nullptr; }
    bool weighs_shared() const { return shared_weight.weights != nullptr; }
};

// Of latent attention: what a head makes of a query's first part, and of a latent vector.
struct LatentHead {
    linear::PackedMatrix key;    // [rank, nope_dim]
    linear::PackedMatrix value;  // [value_dim, rank]
};

struct Layer {
    const float* attention_norm;  // null: attention takes rows as they are
    const float* q_norm;  // null: heads are not normalised
    const float* k_norm;
    const float* sinks;   // [num_heads]; null: heads have none
    const float* after_attention_norm;  // null: what attention makes is added as it is
    const float* mlp_norm;              // as attention_norm
    const float* after_mlp_norm;        // likewise
    const float* latent_norm;        // of latent attention
    const float* query_latent_norm;  // likewise, if query_rank is not 0, as the next but one
    const float* convolution;        // [channels, kernel] of layers with a state, as what follows
    const float* decay;
    const float* decay_bias;
    const float* value_norm;
    std::vector<float> taps;  // of the convolution, as recurrent::Weights has them
    linear::PackedMatrix recurrent_in;
    linear::PackedMatrix qkv;  // heads are queries, keys, values; or, with latent attention:
    linear::PackedMatrix query_latent;
    linear::PackedMatrix queries;
    linear::PackedMatrix latent;
    std::vector<LatentHead> heads;
    linear::PackedMatrix attention_out;
    Mlp mlp;                   // unless the layer has experts
    Experts experts;
    int sliding_window;        // 0: none
    int rope;                  // index into the model's
    int pool_index;            // in a stage's part of the pool: layers with a state have no KV
    int state_number;          // among those with a state

    bool is_recurrent() const { return recurrent_in.weights != nullptr; }
    bool has_experts() const { return !experts.mlps.empty(); }
};

// num_in 0: any, since a rank has a share of the width.
struct MatrixShape {
    int64_t num_out;
    int64_t num_in;
    bool is_gated = false;

    bool operator==(const MatrixShape&) const = default;
};

// What a plan (pdserve/engine/plan) has by this name, where it is kept, and its size.
template <class Owner, class Member, class Size>
struct Field {
    const char* name;
    Member Owner::*member;
    Size (*size)(const Sizes& sizes, const Owner& owner);  // given the fields before
    bool is_optional = false;
};

using NormField = Field<Layer, const float*, int64_t>;
template <class Owner>
using MatrixField = Field<Owner, linear::PackedMatrix, MatrixShape>;

// All that a layer may have; anything else is refused.
inline constexpr NormField kNorms[] = {
    {"attention_norm", &Layer::attention_norm,
        [](auto& sizes, auto&) { return sizes.hidden; }, true},
    {"latent_norm", &Layer::latent_norm,
        [](auto& sizes, auto&) { return sizes.latent.rank; }, true},
    {"query_latent_norm", &Layer::query_latent_norm,
        [](auto& sizes, auto&) { return sizes.latent.query_rank; }, true},
    {"convolution", &Layer::convolution,
        [](auto& sizes, auto&) { return sizes.state_channels() * sizes.recurrent.kernel; }, true},
    {"decay", &Layer::decay, [](auto& sizes, auto&) { return sizes.num_state_heads(); }, true},
    {"decay_bias", &Layer::decay_bias,
        [](auto& sizes, auto&) { return sizes.num_state_heads(); }, true},
    {"value_norm", &Layer::value_norm,
        [](auto& sizes, auto&) { return sizes.recurrent.value_dim; }, true},
    {"q_norm", &Layer::q_norm, [](auto& sizes, auto&) { return sizes.q_norm_size(); }, true},
    {"k_norm", &Layer::k_norm, [](auto& sizes, auto&) { return sizes.k_norm_size(); }, true},
    {"sinks", &Layer::sinks, [](auto& sizes, auto&) { return sizes.num_heads; }, true},
    {"after_attention_norm", &Layer::after_attention_norm,
        [](auto& sizes, auto&) { return sizes.hidden; }, true},
    {"mlp_norm", &Layer::mlp_norm, [](auto& sizes, auto&) { return sizes.hidden; }, true},
    {"after_mlp_norm", &Layer::after_mlp_norm,
        [](auto& sizes, auto&) { return sizes.hidden; }, true},
};

inline constexpr MatrixField<Layer> kMixer[] = {
    {"qkv", &Layer::qkv, [](auto& sizes, auto&) {
        return MatrixShape{sizes.row_width(), sizes.hidden};
    }},
    {"attention_out", &Layer::attention_out, [](auto& sizes, auto&) {
        return MatrixShape{sizes.hidden, sizes.query_width()};
    }},
};

inline constexpr MatrixField<Layer> kRecurrentMixer[] = {
    {"recurrent_in", &Layer::recurrent_in, [](auto& sizes, auto&) {
        return MatrixShape{recurrent::input_width(sizes.recurrent), sizes.hidden};
    }},
    {"attention_out", &Layer::attention_out, [](auto& sizes, auto&) {
        return MatrixShape{sizes.hidden, sizes.state_values()};
    }},
};

inline constexpr MatrixField<Layer> kLatentMixer[] = {
    {"query_latent", &Layer::query_latent, [](auto& sizes, auto&) {
        return MatrixShape{sizes.latent.query_rank, sizes.hidden};
    }, true},
    {"queries", &Layer::queries, [](auto& sizes, auto&) {
        const int64_t rank = sizes.latent.query_rank;
        return MatrixShape{
            sizes.num_heads * sizes.latent.query_dim(), rank > 0 ? rank : sizes.hidden};
    }},
    {"latent", &Layer::latent, [](auto& sizes, auto&) {
        return MatrixShape{sizes.head_dim, sizes.hidden};
    }},
    {"attention_out", &Layer::attention_out, [](auto& sizes, auto&) {
        return MatrixShape{sizes.hidden, sizes.values_width()};
    }},
};

inline constexpr MatrixField<LatentHead> kLatentHead[] = {
    {"key", &LatentHead::key, [](auto& sizes, auto&) {
        return MatrixShape{sizes.latent.rank, sizes.latent.nope_dim};
    }},
    {"value", &LatentHead::value, [](auto& sizes, auto&) {
        return MatrixShape{sizes.latent.value_dim, sizes.latent.rank};
    }},
};

inline constexpr MatrixField<Mlp> kMlp[] = {
    {"down", &Mlp::down, [](auto& sizes, auto&) { return MatrixShape{sizes.hidden, 0}; }},
    {"gate_up", &Mlp::gate_up, [](auto& sizes, auto& mlp) {
        return MatrixShape{2 * mlp.inner(), sizes.hidden, true};
    }},
};

inline constexpr MatrixField<Mlp> kSharedMlp[] = {
    {"shared_down", kMlp[0].member, kMlp[0].size},
    {"shared_gate_up", kMlp[1].member, kMlp[1].size},
};

// pdserve.engine.models.arithmetic.Arithmetic.
struct Arithmetic {
    linear::Result gated;    // what MLPs make of gate and up
    float attention_scale;
    float attention_cap;     // 0: none
    float logit_cap;         // 0: none
    float embedding_scale;
    float logit_scale;
    bool centres_norms;      // of the residual stream
    bool is_parallel;        // the MLP takes what attention takes
};

struct Model {
    Sizes sizes;
    bool is_bfloat16;  // activations and KV; else float32
    float norm_eps;
    // [num_token_ids, hidden], of the activations' type; null: it is coded, or not of this stage.
    const void* embedding;
    linear::PackedMatrix coded_embedding;  // without weights: it is not coded
    std::vector<Layer> layers;
    const float* final_norm;           // [hidden]; null: neither this nor lm_head
    linear::PackedMatrix lm_head;      // [num_token_ids, hidden]
    Arithmetic arithmetic;
    // [2, num_ropes, head_dim / 2], radians a position: of short requests, then of long ones.
    const float* inverse_frequencies;
    std::vector<double> rope_scales;   // of cosines and sines

    bool is_first_stage() const {
        return embedding != nullptr || coded_embedding.weights != nullptr;
    }
    bool is_last_stage() const { return final_norm != nullptr; }
};

}  // namespace pdserve::decoder
