// A layer with a state instead of attention: the gated delta rule.
#pragma once

#include "../attention/layer.h"
#include "../isa/cpu.h"
#include "../recurrent/launch.h"
#include "buffers.h"
#include "model.h"
#include "products.h"

namespace pdserve::decoder {

class RecurrentMixer {
public:
    RecurrentMixer(const Model& model, Variant variant)
        : model_(model), variant_(variant), products_(model.is_bfloat16, variant) {}

    // Of buffers.normed: what heads make, in buffers.attended. Goes on with the requests' states.
    void mix(const Layer& layer, const attention::Step& step, const recurrent::States& states,
        const Buffers& buffers);

private:
    const Model& model_;
    const Variant variant_;
    const Products products_;
};

}  // namespace pdserve::decoder
