// The checks of a packed matrix, for all its users.

#include "packed_matrix.h"

#include <string>

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace pdserve::linear {

namespace {

constexpr int64_t kAlignment = 64;

// A larger dimension is a mistake. The product of two dimensions up to this fits into int64.
constexpr int64_t kMostOutputs = int64_t{1} << 30;

ScaleType scale_type_from(const std::string& name) {
    if (name == "float16") return ScaleType::kFloat16;
    if (name == "float32") return ScaleType::kFloat32;
    if (name == "two_levels") return ScaleType::kTwoLevels;
    if (name == "nested") return ScaleType::kNested;
    raise_value_error("coding.scale", "float16, float32, two_levels or nested", name);
}

Rounding rounding_from(const std::string& name) {
    if (name == "float32") return Rounding::kNone;
    if (name == "float16") return Rounding::kFloat16;
    if (name == "bfloat16") return Rounding::kBFloat16;
    raise_value_error("coding.rounded", "float32, float16 or bfloat16", name);
}

const float* lane_values(
    nb::handle object, const std::string& name, int64_t num_lanes, Access access) {
    if (object.is_none()) return nullptr;
    const TensorView view(object, name.c_str(), access);
    view.expect_type({ElementType::kFloat32});
    view.expect_shape({num_lanes}, "[outputs, padded to panels]");
    view.expect_contiguous();
    return view.data<float>();
}

void read_scales(PackedMatrix& matrix, nb::handle scales, const std::string& prefix,
    int64_t num_lanes, Access access) {
    const FormTraits& form = traits_of(matrix.type);
    const int64_t num_groups =
        form.group_inputs == 0 ? 1 : (matrix.num_in + form.group_inputs - 1) / form.group_inputs;
    matrix.scales = lane_values(scales, prefix + "scales", num_groups * num_lanes, access);
    matrix.scale_stride = num_groups == 1 ? 0 : num_lanes;
    if (form.has_scales && matrix.scales == nullptr) {
        raise_type_error(prefix + "scales", "a tensor, as the weights are " + std::string(form.name),
            "None");
    }
}

WeightType weight_type_from(const std::string& name) {
    std::string known;
    int type = 0;
    for (const FormTraits& form : kForms) {
        if (name == form.name) return static_cast<WeightType>(type);
        known += (type++ == 0 ? "" : ", ") + std::string(form.name);
    }
    raise_value_error("form", "one of " + known, name);
}

Coding coding_from(nb::handle object, int64_t num_in) {
    const Coding coding{
        .bits = nb::cast<int>(object.attr("bits")),
        .group = nb::cast<int>(object.attr("group")),
        .zero = nb::cast<int>(object.attr("zero")),
        .scale = scale_type_from(nb::cast<std::string>(object.attr("scale"))),
        .has_minimums = nb::cast<bool>(object.attr("has_minimums")),
        .rounding = rounding_from(nb::cast<std::string>(object.attr("rounded"))),
    };
    const int bits = coding.bits, group = coding.group;
    if (bits != 4 && bits != 5 && bits != 6 && bits != 8) {
        raise_value_error("coding.bits", "4, 5, 6 or 8", std::to_string(bits));
    }
    if (group < kBlockInputs / 2 || kSuperInputs % group != 0) {
        raise_value_error("coding.group", "16, 32, 64, 128 or 256", std::to_string(group));
    }
    const bool can_nest = bits == 4 && group == kBlockInputs && coding.zero == 0
        && coding.has_minimums && coding.rounding == Rounding::kNone;
    if (coding.is_nested() && !can_nest) {
        raise_value_error("coding.scale", "nested only of 4 bits by 32 with minimums", "otherwise");
    }
    if (num_in % group != 0) {
        raise_value_error(
            "num_in", "a multiple of " + std::to_string(group), std::to_string(num_in));
    }
    return coding;
}

}  // namespace

void read_form(nb::handle form, PackedMatrix& matrix) {
    const nb::object coding = form.attr("coding");
    if (!coding.is_none()) {
        matrix.type = WeightType::kCoded;
        matrix.coding = coding_from(coding, matrix.num_in);
    } else {
        matrix.type = weight_type_from(nb::cast<std::string>(form.attr("name")));
    }
}

int64_t num_lanes_of(const PackedMatrix& matrix) {
    // The same in all forms.
    return kPanelOutputs
        * layout_of(WeightType::kFloat32, matrix.num_out, matrix.num_in, matrix.is_gated)
              .num_panels;
}

int64_t packed_bytes(const PackedMatrix& matrix) {
    if (matrix.type == WeightType::kCoded) {
        const CodedLayout coded = coded_layout_of(
            matrix.coding, matrix.num_out, matrix.num_in, matrix.is_gated);
        return coded.num_panels * coded.panel_bytes;
    }
    const Layout layout =
        layout_of(matrix.type, matrix.num_out, matrix.num_in, matrix.is_gated);
    return layout.num_panels * layout.panel_bytes;
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
    matrix.num_out = nb::cast<int64_t>(object.attr("num_out"));
    matrix.num_in = nb::cast<int64_t>(object.attr("num_in"));
    matrix.is_gated = nb::cast<bool>(object.attr("is_gated"));
    check_sizes(matrix.num_out, matrix.num_in, matrix.is_gated);
    read_form(object.attr("form"), matrix);

    const std::string weights_name = prefix + "weights";
    const TensorView weights(owned.weights, weights_name.c_str(), access);
    weights.expect_type({ElementType::kUInt8});
    weights.expect_shape({packed_bytes(matrix)}, "[packed bytes]");
    weights.expect_contiguous();
    matrix.weights = weights.data<void>();
    const auto address = reinterpret_cast<uintptr_t>(matrix.weights);
    if (address % kAlignment != 0) {
        raise_value_error(weights_name, "memory aligned to 64 bytes",
            "an address with remainder " + std::to_string(address % kAlignment));
    }
    const int64_t num_lanes = num_lanes_of(matrix);
    if (matrix.type != WeightType::kCoded) {
        read_scales(matrix, owned.scales, prefix, num_lanes, access);
    }
    matrix.bias = lane_values(owned.bias, prefix + "bias", num_lanes, access);
    return owned;
}

}  // namespace pdserve::linear
