// The checked launchers of packed products and of packing.

#include "launch.h"

#include <cstring>
#include <string>

#include "../bind.h"
#include "../rows/launch.h"
#include "../tensor_view.h"
#include "codes.h"
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
    if (std::strcmp(name, "gated_clamped") == 0) return Result::kGatedClamped;
    raise_value_error(
        "result", "store, store_float, add, gated_silu, gated_gelu or gated_clamped", name);
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
            matrix.is_gated ? "a gated one, as the matrix is" : "another, for this matrix",
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

void check_rows(int64_t first_row, int64_t num_rows, int64_t num_out) {
    if (first_row < 0 || first_row > num_out - num_rows) {
        raise_value_error("first_row",
            "0 to " + std::to_string(num_out - num_rows) + ", for " + std::to_string(num_rows)
                + " rows of " + std::to_string(num_out),
            std::to_string(first_row));
    }
}

void pack_linear_rows(nb::handle packed, int64_t first_row, nb::handle rows_object) {
    const OwnedMatrix owned = read_packed(packed, "packed", Access::kWrite);
    const PackedMatrix& matrix = owned.matrix;
    if (matrix.type == WeightType::kCoded) {
        raise_value_error("packed.form", "one without a coding", "another");
    }
    const TensorView rows(rows_object, "rows");
    rows.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
    rows.expect_shape({-1, matrix.num_in}, "[num_rows, num_in]");
    rows.expect_contiguous_last_dim();
    check_rows(first_row, rows.size(0), matrix.num_out);
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

// [num_rows, num_bytes], or None where a matrix has none.
const uint8_t* bytes_of(
    nb::handle object, const char* name, int64_t num_rows, int64_t num_bytes) {
    if (object.is_none() != (num_bytes == 0)) {
        raise_type_error(name, num_bytes == 0 ? "None" : "a tensor", "otherwise");
    }
    if (object.is_none()) return nullptr;
    const TensorView view(object, name);
    view.expect_type({ElementType::kUInt8});
    view.expect_shape({num_rows, num_bytes}, "[num_rows, bytes]");
    view.expect_contiguous();
    return view.data<uint8_t>();
}

void check_coded(const PackedMatrix& matrix, const char* name) {
    if (matrix.type != WeightType::kCoded) {
        raise_value_error(std::string(name) + ".form", "one with a coding", "another");
    }
}

void pack_linear_codes(nb::handle packed, int64_t first_row, nb::handle codes, nb::handle scales,
    nb::handle minimums, nb::handle super_scales, nb::handle super_minimums) {
    const OwnedMatrix owned = read_packed(packed, "packed", Access::kWrite);
    const PackedMatrix& matrix = owned.matrix;
    check_coded(matrix, "packed");
    const TensorView rows(codes, "codes");
    rows.expect_shape({-1, matrix.num_in}, "[num_rows, num_in]");
    const int64_t num_rows = rows.size(0);
    check_rows(first_row, num_rows, matrix.num_out);
    const CodedLayout layout =
        coded_layout_of(matrix.coding, matrix.num_out, matrix.num_in, matrix.is_gated);
    const int64_t scales_bytes = layout.num_groups * layout.scale_bytes;
    const int64_t supers_bytes = layout.num_supers * 2;
    const bool has_minimums = matrix.coding.has_minimums;
    const CodeRows source{
        .num_rows = num_rows,
        .codes = bytes_of(codes, "codes", num_rows, matrix.num_in),
        .scales = bytes_of(scales, "scales", num_rows, scales_bytes),
        .minimums = bytes_of(minimums, "minimums", num_rows, has_minimums ? scales_bytes : 0),
        .super_scales = bytes_of(super_scales, "super_scales", num_rows, supers_bytes),
        .super_minimums = bytes_of(super_minimums, "super_minimums", num_rows,
            has_minimums && !matrix.coding.is_nested() ? supers_bytes : 0),
    };
    nb::gil_scoped_release release;
    pack_codes(
        source, matrix, static_cast<uint8_t*>(const_cast<void*>(matrix.weights)), first_row);
}

void look_up_codes(nb::handle table_object, nb::handle ids_object, nb::handle out_object,
    bool to_bfloat16) {
    const OwnedMatrix owned = read_packed(table_object, "table");
    const PackedMatrix& table = owned.matrix;
    check_coded(table, "table");
    if (table.is_gated) raise_value_error("table", "a matrix that is not gated", "one that is");
    const TensorView ids(ids_object, "ids");
    ids.expect_type({ElementType::kInt64});
    ids.expect_shape({-1}, "[num_rows]");
    ids.expect_contiguous();
    rows::check_ids(ids.data<int64_t>(), ids.size(0), table.num_out, "ids");
    const TensorView out(out_object, "out", Access::kWrite);
    out.expect_type({ElementType::kFloat32});
    out.expect_shape({ids.size(0), table.num_in}, "[num_rows, num_in]");
    out.expect_contiguous();
    const CodedLookup lookup{&table, ids.data<int64_t>(), to_bfloat16, 1.0f, out.data<float>()};
    nb::gil_scoped_release release;
    look_up(lookup, ids.size(0));
}

nb::tuple packed_size(nb::handle form, int64_t num_out, int64_t num_in, bool is_gated) {
    check_sizes(num_out, num_in, is_gated);
    PackedMatrix matrix{};
    matrix.num_out = num_out;
    matrix.num_in = num_in;
    matrix.is_gated = is_gated;
    read_form(form, matrix);
    return nb::make_tuple(packed_bytes(matrix), num_lanes_of(matrix));
}

}  // namespace

}  // namespace linear

void bind_linear(nb::module_& m) {
    using nb::arg;
    m.def("linear", &linear::linear, arg("x"), arg("packed"), arg("out"), arg("result") = "store",
        arg("variant") = "", "x times a packed matrix, into `out`.");
    m.def("pack_linear_rows", &linear::pack_linear_rows, arg("packed"), arg("first_row"),
        arg("rows"), "Put rows of a weight matrix into their places in a packed one.");
    m.def("pack_linear_codes", &linear::pack_linear_codes, arg("packed"), arg("first_row"),
        arg("codes"), arg("scales"), arg("minimums").none(), arg("super_scales").none(),
        arg("super_minimums").none(), "Put rows of codes into their places in a packed matrix.");
    m.def("look_up_codes", &linear::look_up_codes, arg("table"), arg("ids"), arg("out"),
        arg("to_bfloat16"), "Copy rows of a coded matrix, widened to float32.");
    m.def("packed_size", &linear::packed_size, arg("form"), arg("num_out"), arg("num_in"),
        arg("is_gated"),
        "Bytes of a packed matrix, and its outputs padded to whole panels.");
}

}  // namespace pdserve
