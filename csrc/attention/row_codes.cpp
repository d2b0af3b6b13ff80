// The checked launchers of row_codes.h. They run on the caller's thread: it is one of the transfer's.

#include "row_codes.h"

#include <string>

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "../bind.h"
#include "../isa/build_name.h"
#include "kernels/store/row_codes.h"
#include "layer.h"
#include "pool_view.h"

namespace nb = nanobind;

namespace pdserve::attention {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Rows {
    int64_t count;
    int row_dim;
    RowCodeFunctions functions;
};

Rows rows_of(size_t number_bytes, size_t coded_bytes, int64_t row_dim, bool is_bfloat16,
    const std::string& format, const std::string& variant_name) {
    const size_t element = is_bfloat16 ? 2 : 4;
    if (row_dim < 1 || row_dim > INT32_MAX / 4)
        raise_value_error("row_dim", "1 or more", std::to_string(row_dim));
    const size_t row_bytes = row_dim * element, coded_row = row_dim + kScaleBytes;
    if (number_bytes % row_bytes != 0)
        raise_value_error("numbers", "whole rows", std::to_string(number_bytes) + " bytes");
    const size_t count = number_bytes / row_bytes;
    if (coded_bytes != count * coded_row)
        raise_value_error("coded", std::to_string(count * coded_row) + " bytes",
            std::to_string(coded_bytes));
    const Variant variant = variant_from(variant_name.c_str());
    const RowCodeKernels& kernels =
        PDSERVE_OF_VARIANT(variant, RowCodeKernels);
    const auto& of_type = is_bfloat16 ? kernels.bfloat16 : kernels.float32;
    const bool is_int8 = codes_named(format) == KvFormat::kInt8;
    return {static_cast<int64_t>(count), static_cast<int>(row_dim),
        is_int8 ? of_type.int8 : of_type.fp8};
}

bool code_rows(ConstBytes numbers, Bytes coded, int64_t row_dim, bool is_bfloat16,
    const std::string& format, const std::string& variant) {
    const Rows rows =
        rows_of(numbers.size(), coded.size(), row_dim, is_bfloat16, format, variant);
    nb::gil_scoped_release unlocked;
    return rows.functions.code(numbers.data(), rows.count, rows.row_dim, coded.data());
}

void decode_rows(ConstBytes coded, Bytes numbers, int64_t row_dim, bool is_bfloat16,
    const std::string& format, const std::string& variant) {
    const Rows rows =
        rows_of(numbers.size(), coded.size(), row_dim, is_bfloat16, format, variant);
    nb::gil_scoped_release unlocked;
    rows.functions.decode(coded.data(), rows.count, rows.row_dim, numbers.data());
}

}  // namespace
}  // namespace pdserve::attention

namespace pdserve {

void bind_row_codes(nb::module_& m) {
    using namespace nb::literals;
    m.def("code_rows", &attention::code_rows, "numbers"_a.noconvert(), "coded"_a.noconvert(), "row_dim"_a,
        "is_bfloat16"_a, "codes"_a, "variant"_a = "");
    m.def("decode_rows", &attention::decode_rows, "coded"_a.noconvert(), "numbers"_a.noconvert(),
        "row_dim"_a, "is_bfloat16"_a, "codes"_a, "variant"_a = "");
}

}  // namespace pdserve
