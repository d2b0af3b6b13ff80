// The launchers of the row kernels: for the decoder, and checked ones for tests.

#include "launch.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "../bind.h"
#include "../isa/build_name.h"
#include "../tensor_view.h"
#include "../threads/thread_pool.h"

namespace nb = nanobind;

namespace pdserve {

namespace rows {

namespace {

// Below this the work takes a few microseconds, and dividing it does not pay.
constexpr int64_t kElementsPerItem = 16 * 1024;

template <class Task>
void share_rows(
    void (*run)(const Task&, int64_t, int64_t), const Task& task, int64_t num_rows) {
    const int64_t rows_per_item = std::max<int64_t>(1, kElementsPerItem / task.size);
    const int64_t num_items = (num_rows + rows_per_item - 1) / rows_per_item;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t first = item * rows_per_item;
        run(task, first, std::min(num_rows, first + rows_per_item));
    });
}

void checked_norm(nb::handle x_object, nb::handle weight_object, double eps,
    nb::handle out_object, const char* variant_name, bool adds) {
    const TensorView x(x_object, "x");
    const TensorView weight(weight_object, "weight");
    const TensorView out(out_object, "out", Access::kWrite);
    x.expect_type({ElementType::kFloat32});
    x.expect_shape({-1, -1}, "[num_rows, size]");
    x.expect_contiguous();
    if (x.size(1) < 1) raise_value_error("x", "rows of at least one element", "0");
    weight.expect_type({ElementType::kFloat32});
    weight.expect_shape({x.size(1)}, "[size]");
    weight.expect_contiguous();
    out.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
    out.expect_shape({x.size(0), x.size(1)}, "that of x");
    out.expect_contiguous();
    const Variant variant = variant_from(variant_name);
    const Norm norm{x.data<float>(), weight.data<float>(), static_cast<float>(eps), x.size(1),
        out.data<void>()};
    const bool to_bfloat16 = out.type() == ElementType::kBFloat16;
    if (adds) out.expect_type({ElementType::kFloat32});
    nb::gil_scoped_release release;
    if (adds) return add_normalised(norm, x.size(0), variant);
    normalise(norm, x.size(0), to_bfloat16, variant);
}

void checked_lookup(nb::handle table_object, nb::handle ids_object, nb::handle out_object,
    const char* variant_name, double scale) {
    const TensorView table(table_object, "table");
    const TensorView ids(ids_object, "ids");
    const TensorView out(out_object, "out", Access::kWrite);
    table.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
    table.expect_shape({-1, -1}, "[num_entries, size]");
    table.expect_contiguous();
    if (table.size(1) < 1) raise_value_error("table", "rows of at least one element", "0");
    ids.expect_type({ElementType::kInt64});
    ids.expect_shape({-1}, "[num_rows]");
    ids.expect_contiguous();
    check_ids(ids.data<int64_t>(), ids.size(0), table.size(0), "ids");
    out.expect_type({ElementType::kFloat32});
    out.expect_shape({ids.size(0), table.size(1)}, "[num_rows, size]");
    out.expect_contiguous();
    const Variant variant = variant_from(variant_name);
    const Lookup lookup{
        table.data<void>(), ids.data<int64_t>(), table.size(1), static_cast<float>(scale),
        out.data<float>()};
    const bool from_bfloat16 = table.type() == ElementType::kBFloat16;
    nb::gil_scoped_release release;
    look_up(lookup, ids.size(0), from_bfloat16, variant);
}

void checked_cap(nb::handle x_object, double size, const char* variant_name) {
    const TensorView x(x_object, "x", Access::kWrite);
    x.expect_type({ElementType::kFloat32});
    x.expect_shape({-1, -1}, "[num_rows, size]");
    x.expect_contiguous_last_dim();
    if (!std::isfinite(size) || size <= 0) {
        raise_value_error("cap", "a finite number above 0", std::to_string(size));
    }
    const Variant variant = variant_from(variant_name);
    const Cap task{x.data<float>(), x.stride(0), x.size(1), static_cast<float>(size)};
    nb::gil_scoped_release release;
    cap(task, x.size(0), variant);
}

}  // namespace

void normalise(const Norm& norm, int64_t num_rows, bool to_bfloat16, Variant variant) {
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant, Kernels);
    share_rows(to_bfloat16 ? kernels.norm_to_bfloat16 : kernels.norm_to_float32, norm, num_rows);
}

void round_rows(const Norm& rows, int64_t num_rows, bool to_bfloat16, Variant variant) {
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant, Kernels);
    share_rows(to_bfloat16 ? kernels.round_to_bfloat16 : kernels.round_to_float32, rows, num_rows);
}

void add_normalised(const Norm& norm, int64_t num_rows, Variant variant) {
    share_rows(PDSERVE_OF_VARIANT(variant, Kernels).add_norm, norm, num_rows);
}

void cap(const Cap& cap, int64_t num_rows, Variant variant) {
    if (cap.size == 0) return;
    share_rows(PDSERVE_OF_VARIANT(variant, Kernels).cap, cap, num_rows);
}

void weigh(const Weigh& weigh, int64_t num_rows, bool is_bfloat16, Variant variant) {
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant, Kernels);
    share_rows(is_bfloat16 ? kernels.weigh_bfloat16 : kernels.weigh_float32, weigh, num_rows);
}

void look_up(const Lookup& lookup, int64_t num_rows, bool from_bfloat16, Variant variant) {
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant, Kernels);
    share_rows(
        from_bfloat16 ? kernels.look_up_bfloat16 : kernels.look_up_float32, lookup, num_rows);
}

void check_ids(const int64_t* ids, int64_t num_rows, int64_t num_entries, const char* name) {
    for (int64_t i = 0; i < num_rows; ++i) {
        if (ids[i] < 0 || ids[i] >= num_entries) {
            raise_value_error(std::string(name) + "[" + std::to_string(i) + "]",
                "an id below " + std::to_string(num_entries), std::to_string(ids[i]));
        }
    }
}

}  // namespace rows

void bind_rows(nb::module_& m) {
    using nb::arg;
    m.def("rms_norm", &rows::checked_norm, arg("x"), arg("weight"), arg("eps"), arg("out"),
        arg("variant") = "", arg("adds") = false,
        "Scale rows to a root mean square of 1, then by `weight`.");
    m.def("look_up_rows", &rows::checked_lookup, arg("table"), arg("ids"), arg("out"),
        arg("variant") = "", arg("scale") = 1.0,
        "Copy rows of a table, widened to float32 and scaled.");
    m.def("cap_rows", &rows::checked_cap, arg("x"), arg("cap"), arg("variant") = "",
        "x becomes cap * tanh(x / cap).");
}

}  // namespace pdserve
