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

// A mixture of experts: the router scores the rows for each, and the best ones compute it.
struct Experts {
    linear::PackedMatrix router;  // [num_experts, hidden], float32
    std::vector<Mlp> mlps;        // of one size; none: the layer has an MLP
    Mlp shared;                   // of all rows; without weights: there is none
    linear::PackedMatrix shared_weight;  // [1, hidden], float32: it is weighed by a sigmoid
    int64_t num_chosen;           // of a row
    bool normalizes_weights;      // those of the chosen ones add up to 1

    int64_t count() const { return static_cast<int64_t>(mlps.size()); }
    int64_t inner() const { return mlps.front().inner(); }
    bool has_shared() const { return shared_weight.weights != nullptr; }
};

struct Layer {
    const float* attention_norm;  // null: attention takes rows as they are
    const float* q_norm;  // null: heads are not normalised
    const float* k_norm;
    const float* after_attention_norm;  // null: what attention makes is added as it is
    const float* mlp_norm;              // as attention_norm
    const float* after_mlp_norm;        // likewise
    linear::PackedMatrix qkv;  // heads are queries, keys, values
    linear::PackedMatrix attention_out;
    Mlp mlp;                   // unless the layer has experts
    Experts experts;
    int sliding_window;        // 0: none
    int rope;                  // index into the model's

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
    {"q_norm", &Layer::q_norm, [](auto& sizes, auto&) { return sizes.q_norm_size(); }, true},
    {"k_norm", &Layer::k_norm, [](auto& sizes, auto&) { return sizes.k_norm_size(); }, true},
    {"after_attention_norm", &Layer::after_attention_norm,
        [](auto& sizes, auto&) { return sizes.hidden; }, true},
    {"mlp_norm", &Layer::mlp_norm, [](auto& sizes, auto&) { return sizes.hidden; }, true},
    {"after_mlp_norm", &Layer::after_mlp_norm,
        [](auto& sizes, auto&) { return sizes.hidden; }, true},
};

inline constexpr MatrixField<Layer> kMixer[] = {
    {"qkv", &Layer::qkv, [](auto& sizes, auto&) {
        return MatrixShape{sizes.qkv_width(), sizes.hidden};
    }},
    {"attention_out", &Layer::attention_out, [](auto& sizes, auto&) {
        return MatrixShape{sizes.hidden, sizes.query_width()};
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
