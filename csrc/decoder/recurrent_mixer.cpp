#include "recurrent_mixer.h"

namespace pdserve::decoder {

void RecurrentMixer::mix(const Layer& layer, const attention::Step& step,
    const recurrent::States& states, const Buffers& buffers) {
    products_.multiply(layer.recurrent_in, buffers.normed, step.num_tokens,
        linear::Result::kStoreFloat, buffers.recurrent_rows);
    const recurrent::Layer rule{
        .shape = model_.sizes.recurrent,
        .weights = {layer.taps.data(), layer.decay, layer.decay_bias, layer.value_norm,
            model_.norm_eps},
        .number = layer.state_number,
        .inputs = buffers.recurrent_rows,
        .out = buffers.attended,
        .to_bfloat16 = model_.is_bfloat16,
    };
    recurrent::mix(rule, step, states, variant_);
}

}  // namespace pdserve::decoder
