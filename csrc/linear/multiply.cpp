// Divides products among the threads, and converts x to the form that the kernels read.

#include <algorithm>
#include <vector>

#include "../scratch_buffer.h"
#include "../threads/thread_pool.h"
#include "form.h"
#include "kernels/kernel.h"
#include "linear.h"

namespace pdserve::linear {

namespace {

constexpr int64_t kFewestRowsPerItem = 48;

// Items per thread: enough that all threads end at nearly the same time. Bytes per item: enough
// that the cost of fetching an item is negligible.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kFewestBytesPerItem = 64 << 10;

// Of panels that were widened: what the L2 cache holds beside rows of x.
constexpr int64_t kMostWidenedBytes = 512 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The items of a product: each combination of a range of rows and a range of panels.
struct Split {
    int64_t num_rows;
    int64_t row_unit;
    int64_t num_panels;
    int64_t row_runs;
    int64_t panel_runs;

    // `wanted`: number of items.
    static Split of(const Call& call, const Form& form, int64_t num_rows, int64_t wanted) {
        const int64_t panels = call.layout.num_panels;
        const int64_t row_unit = form.is_in_place ? 1 : form.rows_together;
        Split split{num_rows, row_unit, panels, ceil_div(num_rows, form.most_rows), 1};
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

    int64_t num_items() const { return row_runs * panel_runs; }

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

// A product of several.
struct Job {
    const Product* product;
    Form form;
    Call call;
    Split split;
    int64_t first_group;  // of rows to be converted, counted over all products
    int64_t first_item;   // likewise
    int64_t x_offset;     // bytes, in the memory for all converted rows

    int64_t num_groups() const {
        return form.is_in_place ? 0 : ceil_div(product->num_rows, form.rows_together);
    }
    int64_t group_bytes() const { return form.rows_together * form.row_bytes; }

    // Brings some rows of x to the form that the kernels read, at call.x.
    void convert(int64_t group) const {
        const int64_t first = group * form.rows_together;
        const int64_t row_bytes = product->x_stride * (product->is_bfloat16 ? 2 : 4);
        const Rows rows{static_cast<const uint8_t*>(product->x) + first * row_bytes,
            product->x_stride, std::min(form.rows_together, product->num_rows - first)};
        auto* target = static_cast<uint8_t*>(const_cast<void*>(call.x)) + group * group_bytes();
        const int64_t num_in = product->matrix->num_in;
        if (form.quantise != nullptr) {
            form.quantise(rows, num_in, form.num_inputs, call.zero, target);
        } else {
            form.convert(rows, num_in, form.num_inputs, target);
        }
    }

    void multiply(int64_t item) const {
        static thread_local ScratchBuffer chunk;
        auto* scratch = static_cast<uint8_t*>(chunk.at_least(form.scratch_bytes));
        if (form.widen != nullptr) return multiply_codes(split.item(item), scratch);
        form.multiply(call, split.item(item), scratch);
    }

    // Widens a chunk of panels at a time, which stays in a cache.
    void multiply_codes(WorkItem item, uint8_t* scratch) const {
        static thread_local ScratchBuffer widened;
        const PackedMatrix& matrix = *product->matrix;
        const CodedLayout layout =
            coded_layout_of(matrix.coding, matrix.num_out, matrix.num_in, matrix.is_gated);
        const int64_t panel_bytes = call.layout.panel_bytes;
        const int64_t at_once =
            kMaxChunkPanels * panel_bytes > kMostWidenedBytes ? 2 : kMaxChunkPanels;
        auto* target = static_cast<uint8_t*>(widened.at_least(at_once * panel_bytes));
        const int64_t end = item.first_panel + item.num_panels;
        for (; item.first_panel < end; item.first_panel += item.num_panels) {
            item.num_panels = std::min(at_once, end - item.first_panel);
            form.widen({matrix.coding, layout, matrix.num_in,
                static_cast<const uint8_t*>(matrix.weights)
                    + item.first_panel * layout.panel_bytes,
                static_cast<int>(item.num_panels), target, panel_bytes});
            Call part = call;
            // The kernels add the first panel's offset again.
            part.weights = reinterpret_cast<const uint8_t*>(
                reinterpret_cast<uintptr_t>(target) - item.first_panel * panel_bytes);
            form.multiply(part, item, scratch);
        }
    }
};

// `wanted`: number of items.
Job job_of(const Product& product, Variant variant, int64_t wanted) {
    const PackedMatrix& matrix = *product.matrix;
    Job job{};
    job.product = &product;
    Call& call = job.call;
    call.weights = static_cast<const uint8_t*>(matrix.weights);
    call.scales = matrix.scales;
    call.scale_stride = matrix.scale_stride;
    call.bias = matrix.bias;
    call.result = product.result;
    call.is_bfloat16 = product.is_bfloat16;
    call.out = product.out;
    call.out_stride = product.out_stride;
    call.delta = product.delta;
    call.num_columns = matrix.is_gated ? matrix.num_out / 2 : matrix.num_out;
    job.form = form_of(product, variant, call);
    call.x = product.x;  // converted rows are elsewhere
    call.x_row_bytes = job.form.is_in_place ? product.x_stride * (product.is_bfloat16 ? 2 : 4)
                                            : job.form.row_bytes;
    job.split = Split::of(call, job.form, product.num_rows, wanted);
    return job;
}

// Calls body(job, its number i) for each of the things that are counted from `first` of a job on.
template <class Body>
void for_all(const std::vector<Job>& jobs, int64_t Job::*first, int64_t count, const Body& body) {
    ThreadPool::instance().parallel_for(count, [&](int64_t i) {
        const auto after = std::upper_bound(jobs.begin(), jobs.end(), i,
            [&](int64_t number, const Job& job) { return number < job.*first; });
        const Job& job = *(after - 1);
        body(job, i - job.*first);
    });
}

}  // namespace

void multiply(const Product& product, Variant variant) { multiply_all(&product, 1, variant); }

void multiply_all(const Product* products, size_t count, Variant variant) {
    static thread_local ScratchBuffer converted_x;
    static thread_local std::vector<Job> all_jobs;
    std::vector<Job>& jobs = all_jobs;  // of this thread, for the others, too
    jobs.clear();
    int64_t num_rows = 0;
    for (size_t i = 0; i < count; ++i) num_rows += products[i].num_rows;
    const int num_threads = ThreadPool::instance().num_threads();
    const int64_t wanted = num_threads == 1 ? 1 : kItemsPerThread * num_threads;
    int64_t num_groups = 0, num_items = 0, x_bytes = 0;
    for (size_t i = 0; i < count; ++i) {
        if (products[i].num_rows == 0) continue;
        Job job =
            job_of(products[i], variant, ceil_div(wanted * products[i].num_rows, num_rows));
        job.first_group = num_groups;
        job.first_item = num_items;
        job.x_offset = x_bytes;
        num_groups += job.num_groups();
        num_items += job.split.num_items();
        x_bytes += job.num_groups() * job.group_bytes();
        jobs.push_back(job);
    }
    if (num_groups > 0) {
        auto* target = static_cast<uint8_t*>(converted_x.at_least(x_bytes));
        for (Job& job : jobs) {
            if (!job.form.is_in_place) job.call.x = target + job.x_offset;
        }
        for_all(jobs, &Job::first_group, num_groups,
            [](const Job& job, int64_t group) { job.convert(group); });
    }
    for_all(jobs, &Job::first_item, num_items,
        [](const Job& job, int64_t item) { job.multiply(item); });
}

}  // namespace pdserve::linear
