// The checked launchers of packed products and of packing.

#include "launch.h"

#include <cstring>
#include <string>

#include "../bind.h"
#include "../tensor_view.h"
#include "linear.h"
#include "pack.h"
#include "packed_matrix.h"

namespace nb = nanobind;

namespace pdserve {

namespace linear {

namespace {

Result result_from(const char* name) {
    if (std::strcmp(name, "store") == 0) return Result::kStore;
    if (std::strcmp(name, "store_float") == 0) return Result::kStoreFloat;
    if (std::strcmp(name, "add") == 0) return Result::kAdd;
    if (std::strcmp(name, "gated_silu") == 0) return Result::kGatedSilu;
    if (std::strcmp(name, "gated_gelu") == 0) return Result::kGatedGelu;
    raise_value_error("result", "store, store_float, add, gated_silu or gated_gelu", name);
}

void check_out(const TensorView& out, const TensorView& x, const PackedMatrix& matrix,
    Result result) {
    const bool is_float = result == Result::kStoreFloat || result == Result::kAdd;
    if (is_float) {
        out.expect_type({ElementType::kFloat32});
    } else {
        out.expect_type_of(x);
    }
    const int64_t columns = matrix.is_gated ? matrix.num_out / 2 : matrix.num_out;
    out.expect_shape({x.size(0), columns}, "[num_rows, outputs]");
    out.expect_contiguous_last_dim();
}

void linear(nb::handle x_object, nb::handle packed, nb::handle out_object,
    const char* result_name, const char* variant_name) {
    const OwnedMatrix owned = read_packed(packed, "packed");
    const PackedMatrix& matrix = owned.matrix;
    const TensorView x(x_object, "x");
    x.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
    x.expect_shape({-1, matrix.num_in}, "[num_rows, num_in]");
    x.expect_contiguous_last_dim();
    const Result result = result_from(result_name);
    if (is_gated(result) != matrix.is_gated) {
        raise_value_error("result",
            matrix.is_gated ? "gated_silu or gated_gelu, as the matrix is gated" : "another, for this matrix",
            result_name);
    }
    const TensorView out(out_object, "out", Access::kWrite);
    check_out(out, x, matrix, result);
    const Variant variant = variant_from(variant_name);
    const Product product{
        .matrix = &matrix,
        .x = x.data<void>(),
        .is_bfloat16 = x.type() == ElementType::kBFloat16,
        .x_stride = x.stride(0),
        .num_rows = x.size(0),
        .result = result,
        .out = out.data<void>(),
        .out_stride = out.stride(0),
    };
    nb::gil_scoped_release release;
    multiply(product, variant);
}

void pack_linear_rows(nb::handle packed, int64_t first_row, nb::handle rows_object) {
    const OwnedMatrix owned = read_packed(packed, "packed", Access::kWrite);
    const PackedMatrix& matrix = owned.matrix;
    const TensorView rows(rows_object, "rows");
    rows.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
    rows.expect_shape({-1, matrix.num_in}, "[num_rows, num_in]");
    rows.expect_contiguous_last_dim();
    if (first_row < 0 || first_row > matrix.num_out - rows.size(0)) {
        raise_value_error("first_row",
            "0 to " + std::to_string(matrix.num_out - rows.size(0)) + ", for "
                + std::to_string(rows.size(0)) + " rows of " + std::to_string(matrix.num_out),
            std::to_string(first_row));
    }
    const PackSource source{
        .rows = rows.data<void>(),
        .is_bfloat16 = rows.type() == ElementType::kBFloat16,
        .stride = rows.stride(0),
        .num_rows = rows.size(0),
    };
    const PackTarget target{
        .type = matrix.type,
        .num_out = matrix.num_out,
        .num_in = matrix.num_in,
        .is_gated = matrix.is_gated,
        .weights = static_cast<uint8_t*>(const_cast<void*>(matrix.weights)),
        .scales = const_cast<float*>(matrix.scales),
    };
    int64_t bad_row;
    {
        nb::gil_scoped_release release;
        bad_row = pack_rows(source, target, first_row);
    }
    if (bad_row >= 0) {
        raise_value_error("rows", "finite values, as the weights become int8",
            "another in row " + std::to_string(bad_row) + " of the matrix");
    }
}

nb::tuple packed_size(
    const char* form, int64_t num_out, int64_t num_in, bool is_gated) {
    const WeightType type = weight_type_from(form);
    check_sizes(num_out, num_in, is_gated);
    const Layout layout = layout_of(type, num_out, num_in, is_gated);
    return nb::make_tuple(
        layout.num_panels * layout.panel_bytes, layout.num_panels * kPanelOutputs);
}

}  // namespace

}  // namespace linear

void bind_linear(nb::module_& m) {
    using nb::arg;
    m.def("linear", &linear::linear, arg("x"), arg("packed"), arg("out"), arg("result") = "store",
        arg("variant") = "", "x times a packed matrix, into `out`.");
    m.def("pack_linear_rows", &linear::pack_linear_rows, arg("packed"), arg("first_row"),
        arg("rows"), "Put rows of a weight matrix into their places in a packed one.");
    m.def("packed_size", &linear::packed_size, arg("form"), arg("num_out"), arg("num_in"),
        arg("is_gated"),
        "Bytes of a packed matrix, and its outputs padded to whole panels.");
}

}  // namespace pdserve
