// The checks of a packed matrix, for all its users.

#include "packed_matrix.h"

#include <cstring>
#include <string>

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace pdserve::linear {

namespace {

constexpr int64_t kAlignment = 64;

// A larger dimension is a mistake. The product of two dimensions up to this fits into int64.
constexpr int64_t kMostOutputs = int64_t{1} << 30;

const float* lane_values(
    nb::handle object, const std::string& name, int64_t num_lanes, Access access) {
    if (object.is_none()) return nullptr;
    const TensorView view(object, name.c_str(), access);
    view.expect_type({ElementType::kFloat32});
    view.expect_shape({num_lanes}, "[outputs, padded to panels]");
    view.expect_contiguous();
    return view.data<float>();
}

}  // namespace

WeightType weight_type_from(const char* name) {
    std::string known;
    int type = 0;
    for (const FormTraits& form : kForms) {
        if (std::strcmp(name, form.name) == 0) return static_cast<WeightType>(type);
        known += (type++ == 0 ? "" : ", ") + std::string(form.name);
    }
    raise_value_error("form", "one of " + known, name);
}

void check_sizes(int64_t num_out, int64_t num_in, bool is_gated) {
    if (num_out < 1 || num_in < 1 || num_out > kMostOutputs || num_in > kMostOutputs) {
        raise_value_error("num_out and num_in", "at least 1 and at most "
                + std::to_string(kMostOutputs),
            std::to_string(num_out) + " and " + std::to_string(num_in));
    }
    if (is_gated && num_out % 2 != 0) {
        raise_value_error(
            "num_out", "an even number, gate and up together", std::to_string(num_out));
    }
}

OwnedMatrix read_packed(nb::handle object, const char* name, Access access) {
    const std::string prefix = std::string(name) + ".";
    OwnedMatrix owned{{}, object.attr("weights"), object.attr("scales"), object.attr("bias")};
    PackedMatrix& matrix = owned.matrix;
    matrix.type = weight_type_from(nb::cast<std::string>(object.attr("form").attr("name")).c_str());
    matrix.num_out = nb::cast<int64_t>(object.attr("num_out"));
    matrix.num_in = nb::cast<int64_t>(object.attr("num_in"));
    matrix.is_gated = nb::cast<bool>(object.attr("is_gated"));
    check_sizes(matrix.num_out, matrix.num_in, matrix.is_gated);
    const Layout layout =
        layout_of(matrix.type, matrix.num_out, matrix.num_in, matrix.is_gated);

    const std::string weights_name = prefix + "weights";
    const TensorView weights(owned.weights, weights_name.c_str(), access);
    weights.expect_type({ElementType::kUInt8});
    weights.expect_shape({layout.num_panels * layout.panel_bytes}, "[packed bytes]");
    weights.expect_contiguous();
    matrix.weights = weights.data<void>();
    const auto address = reinterpret_cast<uintptr_t>(matrix.weights);
    if (address % kAlignment != 0) {
        raise_value_error(weights_name, "memory aligned to 64 bytes",
            "an address with remainder " + std::to_string(address % kAlignment));
    }
    const int64_t num_lanes = layout.num_panels * kPanelOutputs;
    const FormTraits& form = traits_of(matrix.type);
    const int64_t num_groups =
        form.group_inputs == 0 ? 1 : (matrix.num_in + form.group_inputs - 1) / form.group_inputs;
    matrix.scales = lane_values(owned.scales, prefix + "scales", num_groups * num_lanes, access);
    matrix.scale_stride = num_groups == 1 ? 0 : num_lanes;
    if (form.has_scales && matrix.scales == nullptr) {
        raise_type_error(prefix + "scales", "a tensor, as the weights are " + std::string(form.name),
            "None");
    }
    matrix.bias = lane_values(owned.bias, prefix + "bias", num_lanes, access);
    return owned;
}

}  // namespace pdserve::linear
