// Divides a product among the threads, and converts x to the form that the kernels read.

#include <algorithm>

#include "../scratch_buffer.h"
#include "../thread_pool.h"
#include "form.h"
#include "kernel.h"
#include "linear.h"

namespace pdserve::linear {

namespace {

constexpr int64_t kFewestRowsPerItem = 48;

// Items per thread: enough that all threads end at nearly the same time. Bytes per item: enough
// that the cost of fetching an item is negligible.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kFewestBytesPerItem = 64 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// x in the form that the kernels read; in `scratch` if it has to be converted.
void bring_x(const Product& product, const Form& form, ScratchBuffer& scratch, Call& call) {
    if (form.is_in_place) {
        call.x = product.x;
        call.x_row_bytes = product.x_stride * form.element_bytes;
        return;
    }
    const int64_t num_groups = ceil_div(product.num_rows, form.rows_together);
    const int64_t group_bytes = form.rows_together * form.row_bytes();
    auto* target = static_cast<uint8_t*>(scratch.at_least(num_groups * group_bytes));
    const int64_t source_bytes = product.x_stride * (product.is_bfloat16 ? 2 : 4);
    ThreadPool::instance().parallel_for(num_groups, [&](int64_t group) {
        const int64_t first = group * form.rows_together;
        const Rows rows{static_cast<const uint8_t*>(product.x) + first * source_bytes,
            product.x_stride, std::min(form.rows_together, product.num_rows - first)};
        form.convert(rows, product.matrix->num_in, form.num_inputs, target + group * group_bytes);
    });
    call.x = target;
    call.x_row_bytes = form.row_bytes();
}

// The items of a product: each combination of a range of rows and a range of panels.
struct Split {
    int64_t num_rows;
    int64_t row_unit;
    int64_t num_panels;
    int64_t row_runs;
    int64_t panel_runs;

    static Split of(const Call& call, const Form& form, int64_t num_rows, int num_threads) {
        const int64_t panels = call.layout.num_panels;
        const int64_t row_unit = form.is_in_place ? 1 : form.rows_together;
        Split split{num_rows, row_unit, panels, ceil_div(num_rows, form.most_rows), 1};
        const int64_t wanted = num_threads == 1 ? 1 : kItemsPerThread * num_threads;
        const int64_t most_runs =
            std::max<int64_t>(1, panels * call.layout.panel_bytes / kFewestBytesPerItem);
        split.panel_runs = std::min(
            {ceil_div(panels, kMaxChunkPanels), most_runs, ceil_div(wanted, split.row_runs)});
        while (split.row_runs * split.panel_runs < wanted
            && num_rows / (split.row_runs + 1) >= kFewestRowsPerItem) {
            ++split.row_runs;
        }
        return split;
    }

    WorkItem item(int64_t index) const {
        const int64_t rows = index / panel_runs;
        WorkItem item;
        item.first_row = row_start(rows);
        item.num_rows = row_start(rows + 1) - item.first_row;
        item.first_panel = run_start(index % panel_runs);
        item.num_panels = run_start(index % panel_runs + 1) - item.first_panel;
        return item;
    }

    int64_t row_start(int64_t run) const {
        const int64_t units = ceil_div(num_rows, row_unit);
        return std::min(units * run / row_runs * row_unit, num_rows);
    }

    // Each range consists of whole chunks, except the last one.
    int64_t run_start(int64_t run) const {
        const int64_t chunks = ceil_div(num_panels, kMaxChunkPanels);
        return std::min(chunks * run / panel_runs * kMaxChunkPanels, num_panels);
    }
};

}  // namespace

void multiply(const Product& product, Variant variant) {
    if (product.num_rows == 0) return;
    const PackedMatrix& matrix = *product.matrix;
    Call call;
    call.weights = static_cast<const uint8_t*>(matrix.weights);
    call.layout = layout_of(matrix.type, matrix.num_out, matrix.num_in, matrix.is_gated);
    call.scales = matrix.scales;
    call.bias = matrix.bias;
    call.result = product.result;
    call.is_bfloat16 = product.is_bfloat16;
    call.out = product.out;
    call.out_stride = product.out_stride;
    call.num_columns = matrix.is_gated ? matrix.num_out / 2 : matrix.num_out;

    static thread_local ScratchBuffer converted_x;
    const Form form = form_of(product, call.layout, variant);
    bring_x(product, form, converted_x, call);
    ThreadPool& pool = ThreadPool::instance();
    const Split split = Split::of(call, form, product.num_rows, pool.num_threads());
    pool.parallel_for(split.row_runs * split.panel_runs, [&](int64_t i) {
        static thread_local ScratchBuffer chunk;
        auto* scratch = static_cast<uint8_t*>(chunk.at_least(form.scratch_bytes));
        form.multiply(call, split.item(i), scratch);
    });
}

}  // namespace pdserve::linear
