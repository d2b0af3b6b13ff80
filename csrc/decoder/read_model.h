// Reads a model from Python: NativeWeights (pdserve/engine/native/weights.py), and its other
// settings.
#pragma once

#include <cstdint>
#include <vector>

#include <nanobind/nanobind.h>

#include "model.h"

namespace pdserve::decoder {

// What the weights do not contain.
struct ModelArguments {
    nanobind::handle weights;
    Sizes sizes;       // but for those of MLPs and experts
    bool is_bfloat16;  // activations, embedding and KV; else float32
    double norm_eps;
    std::vector<int64_t> sliding_windows;  // of each layer; 0: none
    nanobind::handle inverse_frequencies;  // [2, number of ropes, rope_dim / 2] float32
    std::vector<double> rope_scales;
    std::vector<int64_t> layer_ropes;  // which of them a layer has
    Arithmetic arithmetic;
};

// A model that owns references to its tensors, so it stays valid without the weights object.
struct OwnedModel {
    Model model;
    std::vector<nanobind::object> owners;
};

// Raises TypeError or ValueError: a tensor of the wrong dtype or shape, or sizes that contradict.
OwnedModel read_model(const ModelArguments& arguments);

}  // namespace pdserve::decoder
