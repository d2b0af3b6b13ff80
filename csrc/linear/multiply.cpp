// Divides a product among the threads, and converts x to the form that the kernels read.

#include <algorithm>

#include "../build_name.h"
#include "../scratch_buffer.h"
#include "../thread_pool.h"
#include "kernel.h"
#include "linear.h"

namespace pdserve::linear {

namespace {

// Number of rows that use a chunk of panels while it is in the L2 cache.
constexpr int64_t kMostRowsPerItem = 192;
constexpr int64_t kFewestRowsPerItem = 48;

// Items per thread: enough that all threads end at nearly the same time. Bytes per item: enough
// that the cost of fetching an item is negligible.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kFewestBytesPerItem = 64 << 10;

// Number of rows that a thread converts at a time.
constexpr int64_t kConvertRows = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Form {
    MultiplyFunction multiply;
    ConvertFunction convert;
    bool is_in_place;  // x can be read where it is
    bool widens;       // weights, in scratch memory, where there are many rows
    int64_t element_bytes;
};

Form form_of(const Product& product, const Layout& layout, const ProductKernels& kernels) {
    const WeightType type = product.matrix->type;
    const bool has_whole_units = product.matrix->num_in % layout.unit_inputs == 0;
    if (product.is_bfloat16 && kernels.has_pairs && type != WeightType::kFloat32) {
        return {type == WeightType::kInt8 ? kernels.int8_by_pairs : kernels.bfloat16_by_pairs,
            kernels.pad_pairs, has_whole_units, type == WeightType::kInt8, 2};
    }
    const MultiplyFunction multiply = type == WeightType::kInt8 ? kernels.int8_by_float32
        : type == WeightType::kBFloat16                        ? kernels.bfloat16_by_float32
                                                               : kernels.float32_by_float32;
    const bool widens = type != WeightType::kFloat32;
    if (product.is_bfloat16) return {multiply, kernels.widen_bfloat16, false, widens, 4};
    return {multiply, kernels.widen_float32, has_whole_units, widens, 4};
}

// x in the form that the kernels read; in `scratch` if it has to be converted.
void bring_x(const Product& product, const Form& form, ScratchBuffer& scratch, Call& call) {
    if (form.is_in_place) {
        call.x = product.x;
        call.x_row_bytes = product.x_stride * form.element_bytes;
        return;
    }
    const int64_t num_in = product.matrix->num_in;
    const int64_t padded = call.layout.num_units * call.layout.unit_inputs;
    const int64_t row_bytes = padded * form.element_bytes;
    auto* target = static_cast<uint8_t*>(scratch.at_least(product.num_rows * row_bytes));
    const int64_t source_bytes = product.x_stride * (product.is_bfloat16 ? 2 : 4);
    ThreadPool::instance().parallel_for(ceil_div(product.num_rows, kConvertRows), [&](int64_t i) {
        const int64_t first = i * kConvertRows;
        const Rows rows{static_cast<const uint8_t*>(product.x) + first * source_bytes,
            product.x_stride, std::min(kConvertRows, product.num_rows - first)};
        form.convert(rows, num_in, padded, target + first * row_bytes);
    });
    call.x = target;
    call.x_row_bytes = row_bytes;
}

// The items of a product: each combination of a range of rows and a range of panels.
struct Split {
    int64_t num_rows;
    int64_t num_panels;
    int64_t row_runs;
    int64_t panel_runs;

    static Split of(const Call& call, int64_t num_rows, int num_threads) {
        const int64_t panels = call.layout.num_panels;
        Split split{num_rows, panels, ceil_div(num_rows, kMostRowsPerItem), 1};
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
        item.first_row = num_rows * rows / row_runs;
        item.num_rows = num_rows * (rows + 1) / row_runs - item.first_row;
        item.first_panel = run_start(index % panel_runs);
        item.num_panels = run_start(index % panel_runs + 1) - item.first_panel;
        return item;
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
    const ProductKernels& kernels = PDSERVE_OF_VARIANT(variant, ProductKernels);
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
    const Form form = form_of(product, call.layout, kernels);
    bring_x(product, form, converted_x, call);
    ThreadPool& pool = ThreadPool::instance();
    const Split split = Split::of(call, product.num_rows, pool.num_threads());
    const int64_t chunk_bytes = form.widens
        ? kMaxChunkPanels * call.layout.num_units * call.layout.unit_inputs * kUnitBytes
        : 0;
    pool.parallel_for(split.row_runs * split.panel_runs, [&](int64_t i) {
        static thread_local ScratchBuffer chunk;
        form.multiply(call, split.item(i), static_cast<uint8_t*>(chunk.at_least(chunk_bytes)));
    });
}

}  // namespace pdserve::linear
