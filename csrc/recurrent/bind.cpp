#include "bind.h"

#include <string>

#include "../bind.h"
#include "../tensor_view.h"
#include "launch.h"

namespace nb = nanobind;

namespace pdserve {

namespace recurrent {

namespace {

constexpr double kNormEps = 1e-6;

void checked_rule(nb::handle inputs_object, nb::handle taps_object, nb::handle decay_object,
    nb::handle bias_object, nb::handle norm_object, int64_t num_groups, int64_t key_dim,
    int64_t num_before, nb::handle state_object, nb::handle out_object, const char* variant_name) {
    const TensorView inputs(inputs_object, "inputs"), taps(taps_object, "taps");
    const TensorView decay(decay_object, "decay"), bias(bias_object, "decay_bias");
    const TensorView norm(norm_object, "value_norm");
    const TensorView state(state_object, "state", Access::kWrite);
    const TensorView out(out_object, "out", Access::kWrite);
    for (const TensorView* each : {&inputs, &taps, &decay, &bias, &norm, &state}) {
        each->expect_type({ElementType::kFloat32});
        each->expect_contiguous();
    }
    taps.expect_shape({-1, -1, -1}, "[num_groups, kernel, channels]");
    norm.expect_shape({-1}, "[value_dim]");
    decay.expect_shape({-1}, "[value heads]");
    bias.expect_shape({decay.size(0)}, "[value heads]");
    if (num_groups < 1 || key_dim < 1 || norm.size(0) < 1 || decay.size(0) % num_groups != 0) {
        raise_value_error("num_groups", "a divisor of the value heads", std::to_string(num_groups));
    }
    const Shape shape{.num_groups = num_groups, .model_groups = num_groups, .first_group = 0,
        .group_size = decay.size(0) / num_groups,
        .key_dim = key_dim, .value_dim = norm.size(0), .kernel = taps.size(1)};
    if (shape.kernel < 2) raise_value_error("taps", "2 at least", std::to_string(shape.kernel));
    const int64_t channels = 2 * key_dim + shape.group_size * shape.value_dim;
    taps.expect_shape({num_groups, shape.kernel, channels}, "[num_groups, kernel, channels]");
    inputs.expect_shape({-1, input_width(shape)}, "[num_rows, input_width]");
    state.expect_shape({num_groups * group_state(shape)}, "[numbers of a state]");
    out.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
    out.expect_shape({inputs.size(0), decay.size(0) * shape.value_dim}, "[num_rows, values]");
    out.expect_contiguous();
    if (num_before < 0) raise_value_error("num_before", "0 or more", std::to_string(num_before));
    const int32_t start[] = {0, static_cast<int32_t>(inputs.size(0))};
    const int32_t length = static_cast<int32_t>(num_before + inputs.size(0));
    const int32_t tables[] = {0, 0, 0}, kept_after = 0;
    attention::Step step{};
    step.num_requests = 1;
    step.num_tokens = inputs.size(0);
    step.query_start = start;
    step.context_lens = &length;
    const States states{.pool = state.data<char>(),
        .block_bytes = state.size(0) * static_cast<int64_t>(sizeof(float)),
        .tables = tables,
        .num_blocks = 1,
        .kept_after = &kept_after};
    const Layer layer{.shape = shape,
        .weights = {taps.data<float>(), decay.data<float>(), bias.data<float>(),
            norm.data<float>(), static_cast<float>(kNormEps)},
        .number = 0,
        .inputs = inputs.data<float>(),
        .out = out.data<void>(),
        .to_bfloat16 = out.type() == ElementType::kBFloat16};
    const Variant variant = variant_from(variant_name);
    nb::gil_scoped_release release;
    mix(layer, step, states, variant);
}

}  // namespace

}  // namespace recurrent

void bind_recurrent(nb::module_& m) {
    using nb::arg;
    m.def("gated_delta", &recurrent::checked_rule, arg("inputs"), arg("taps"), arg("decay"),
        arg("decay_bias"), arg("value_norm"), arg("num_groups"), arg("key_dim"),
        arg("num_before"), arg("state"), arg("out"), arg("variant") = "",
        "Go on with the state of one request in one layer.");
}

}  // namespace pdserve
