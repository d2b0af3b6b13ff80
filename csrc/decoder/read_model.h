// Reads a model from Python: NativeWeights (pdserve/engine/native/weights.py), and its other
// settings.
#pragma once

#include <cstdint>
#include <vector>

#include <nanobind/nanobind.h>

#include "model.h"

namespace pdserve::decoder {

// The settings that the weights do not contain.
struct ModelArguments {
    nanobind::handle weights;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t model_kv_heads;  // of the whole model, of which this may be one rank's part
    int64_t first_kv_head;
    int64_t vocab_size;      // of the whole model
    int64_t first_token_id;  // of the rank's share
    int64_t num_token_ids;   // likewise
    int64_t first_layer;     // of the stage, in the pool
    int64_t pool_layers;
    bool is_bfloat16;        // activations, embedding and KV; else float32
    int64_t head_dim;
    double norm_eps;
    std::vector<int64_t> sliding_windows;  // of each layer; 0: none
    nanobind::handle inverse_frequencies;  // [head_dim / 2] float32
    double rope_scale;
};

// A model that owns references to its tensors, so it stays valid without the weights object.
struct OwnedModel {
    Model model;
    std::vector<nanobind::object> owners;
};

// Raises TypeError or ValueError: a tensor of the wrong dtype or shape, or sizes that contradict.
OwnedModel read_model(const ModelArguments& arguments);

}  // namespace pdserve::decoder
