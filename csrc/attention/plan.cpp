// Divides the attention of a step into work items, and the items among threads.

#include <algorithm>
#include <numeric>

#include "../isa/build_name.h"
#include "../scratch_buffer.h"
#include "../threads/thread_pool.h"
#include "kernels/amx/scratch.h"
#include "kernels/scratch.h"
#include "kernels/seeing.h"
#include "layer.h"

namespace pdserve::attention {

namespace {

// Queries per work item: enough that packing the keys costs little compared with using them, and
// few enough that the running sums stay in the L2 cache. The lower limit applies if there would be
// too few items for all threads.
constexpr int kMostQueriesPerItem = 192;
constexpr int kFewestQueriesPerItem = 24;
constexpr int64_t kItemsPerThread = 4;
constexpr int32_t kAllRuns = INT32_MAX / kRunKeys;

int64_t items_wanted(int num_threads) {
    return num_threads == 1 ? 1 : kItemsPerThread * num_threads;
}

int64_t ceil_div(int64_t number, int64_t by) { return (number + by - 1) / by; }

const AttendKernels& kernels_of(Variant variant, bool is_bfloat16, KvFormat format) {
#if defined(__x86_64__)
    if (variant == Variant::kAmx && is_bfloat16) return of_format(kAmxTileKernels, format);
    if (variant == Variant::kAmxEmulated && is_bfloat16) {
        return of_format(kAmxEmulatedTileKernels, format);
    }
#endif
    const Kernels& kernels = format == KvFormat::kInt8 ? PDSERVE_OF_VARIANT(variant, Int8Kernels)
        : format == KvFormat::kFp8                     ? PDSERVE_OF_VARIANT(variant, Fp8Kernels)
                                                       : PDSERVE_OF_VARIANT(variant, Kernels);
    return is_bfloat16 ? kernels.bfloat16 : kernels.float32;
}

}  // namespace

void Plan::make(
    const Step& step, const Pool& pool, int num_heads, int sliding_window, RowChoice choice) {
    call_ = {};
    call_.block_stride = pool.num_layers * pool.layer_elements();
    call_.value_offset = pool.value_offset();
    call_.row_elements = pool.row_elements();
    call_.query_start = step.query_start;
    call_.context_lens = step.context_lens;
    call_.block_tables = step.block_tables;
    call_.table_stride = step.table_stride;
    call_.num_heads = num_heads;
    call_.num_kv_heads = pool.num_kv_heads;
    call_.head_dim = pool.head_dim;
    call_.block_size = pool.block_size;
    call_.sliding_window = sliding_window;
    pool_ = pool;

    const int num_threads = ThreadPool::instance().num_threads();
    const int64_t num_rows = choice.num_rows < 0 ? step.num_tokens : choice.num_rows;
    int queries = kMostQueriesPerItem;
    while (queries > kFewestQueriesPerItem
        && num_rows * num_heads < items_wanted(num_threads) * queries) {
        queries /= 2;
    }
    rows_per_item_ = std::max(1, queries / (num_heads / pool.num_kv_heads));

    // The most expensive items come first, so that no thread begins one at the end: requests with
    // the longest contexts first, and within a request the last rows, which see the most keys.
    requests_.resize(step.num_requests);
    std::iota(requests_.begin(), requests_.end(), 0);
    std::sort(requests_.begin(), requests_.end(), [&](int32_t a, int32_t b) {
        const int32_t left = step.context_lens[a], right = step.context_lens[b];
        return left != right ? left > right : a < b;
    });
    chunks_.clear();
    for (int32_t request : requests_) add_request(request, choice);
    share_out(num_threads);
    reserve_memory();
}

void Plan::add_request(int32_t request, RowChoice choice) {
    const int32_t first = call_.query_start[request], last = call_.query_start[request + 1];
    if (choice.num_rows < 0) {
        add_rows(request, 0, last - first);
        return;
    }
    const int64_t* chosen = std::lower_bound(choice.rows, choice.rows + choice.num_rows, last);
    while (chosen != choice.rows && chosen[-1] >= first) {
        const int64_t end = *--chosen + 1;
        int64_t start = end - 1;
        while (chosen != choice.rows && chosen[-1] >= first && chosen[-1] == start - 1) {
            start = *--chosen;
        }
        add_rows(request, static_cast<int32_t>(start - first), static_cast<int32_t>(end - first));
    }
}

void Plan::add_rows(int32_t request, int32_t first_row, int32_t last_row) {
    for (int32_t end = last_row; end > first_row; end -= rows_per_item_) {
        const int32_t start = std::max(first_row, end - rows_per_item_);
        chunks_.push_back({
            .request = request,
            .first_head = 0,
            .num_heads = call_.num_kv_heads,
            .first_row = start,
            .num_rows = end - start,
            .first_run = 0,
            .last_run = kAllRuns,
            .shared = -1,
        });
    }
}

// Divides the chunks into no more items than are wanted, since an item of several heads can
// prefetch the next head while it computes. Heads are divided first, then runs.
void Plan::share_out(int num_threads) {
    items_.clear();
    shared_.clear();
    num_state_floats_ = 0;
    if (chunks_.empty()) return;
    const int64_t wanted = items_wanted(num_threads);
    const int64_t num_chunks = static_cast<int64_t>(chunks_.size());
    const int64_t shares = std::min<int64_t>(ceil_div(wanted, num_chunks), call_.num_kv_heads);
    const int heads_per_item = static_cast<int>(ceil_div(call_.num_kv_heads, shares));
    const int64_t num_items = num_chunks * ceil_div(call_.num_kv_heads, heads_per_item);
    const auto num_parts = static_cast<int32_t>(num_threads == 1 ? 1 : ceil_div(wanted, num_items));
    for (WorkItem item : chunks_) {
        for (int head = 0; head < call_.num_kv_heads; head += heads_per_item) {
            item.first_head = head;
            item.num_heads = std::min(heads_per_item, call_.num_kv_heads - head);
            if (num_parts == 1 || item.num_heads > 1) {
                items_.push_back(item);
            } else {
                share_runs(item, num_parts);
            }
        }
    }
}

void Plan::share_runs(const WorkItem& item, int32_t num_parts) {
    const Seeing seeing(call_, item);
    const int32_t first = seeing.first_key / kRunKeys;
    const int32_t last = static_cast<int32_t>(ceil_div(seeing.last_key, kRunKeys));
    const auto runs_per_part = static_cast<int32_t>(ceil_div(last - first, num_parts));
    if (runs_per_part == last - first) {
        items_.push_back(item);
        return;
    }
    WorkItem part = item;
    part.shared = static_cast<int32_t>(shared_.size());
    for (part.first_run = first; part.first_run < last; part.first_run += runs_per_part) {
        part.last_run = std::min(last, part.first_run + runs_per_part);
        items_.push_back(part);
    }
    const auto parts = static_cast<int32_t>(ceil_div(last - first, runs_per_part));
    shared_.push_back({item, first, parts, num_state_floats_});
    num_state_floats_ += (last - first) * state_size_of(item);
}

void Plan::reserve_memory() {
    first_state_ = states_.of<float>(num_state_floats_);
    parts_left_.clear();
    for (const SharedItem& shared : shared_) parts_left_.push_back(shared.num_parts);
    int most_rows = 0;
    for (const WorkItem& item : items_) most_rows = std::max(most_rows, item.num_rows);
    const int group_size = call_.num_heads / call_.num_kv_heads;
    scratch_bytes_ = std::max(Scratch(nullptr, most_rows * group_size, call_.head_dim).num_bytes,
        TileScratch(nullptr, most_rows * group_size, call_.head_dim).num_bytes);
}

size_t Plan::state_size_of(const WorkItem& item) const {
    const int group_size = call_.num_heads / call_.num_kv_heads;
    return shared_state_size(item.num_rows * group_size, call_.head_dim);
}

void attend(Plan& plan, const Step& step, int layer, const QueryRows& query, void* out, const Scoring& scoring,
    Variant variant) {
    Call& call = plan.call_;
    call.block_tables = step.block_tables;
    call.table_stride = step.table_stride;
    call.query = query.data;
    call.query_row_stride = query.row_stride;
    call.query_head_stride = query.head_stride;
    call.out = out;
    const Pool& pool = plan.pool_;
    call.layer_pool = static_cast<const char*>(pool.data) + layer * pool.layer_bytes();
    call.scale = scoring.scale;
    call.cap = scoring.cap;
    call.sinks = scoring.sinks;
    const AttendKernels& kernel = kernels_of(variant, query.is_bfloat16, pool.format);
    ThreadPool::instance().parallel_for(static_cast<int64_t>(plan.items_.size()), [&](int64_t i) {
        static thread_local ScratchBuffer thread_scratch;
        void* scratch = thread_scratch.at_least(plan.scratch_bytes_);
        const WorkItem& item = plan.items_[i];
        if (item.shared < 0) {
            kernel.attend(call, item, scratch, nullptr);
            return;
        }
        const Plan::SharedItem& shared = plan.shared_[item.shared];
        float* states = plan.first_state_ + shared.states;
        const size_t runs_before = item.first_run - shared.first_run;
        kernel.attend(call, item, scratch, states + runs_before * plan.state_size_of(item));
        int32_t& parts_left = plan.parts_left_[item.shared];
        if (__atomic_sub_fetch(&parts_left, 1, __ATOMIC_ACQ_REL) == 0) {
            parts_left = shared.num_parts;  // for the next layer
            kernel.fold(call, shared.whole, scratch, states);
        }
    });
}

}  // namespace pdserve::attention
