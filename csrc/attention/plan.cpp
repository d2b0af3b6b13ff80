// The split of a step's attention into work items, and their sharing among threads.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>

#include "../build_name.h"
#include "../thread_pool.h"
#include "layer.h"
#include "scratch.h"

namespace pdserve::attention {

namespace {

// Enough queries a work item that packing its keys costs little beside using them; few enough that
// their sums stay in the L2 cache. The fewest is for when there would be too few items to share.
constexpr int kMostQueriesPerItem = 96;
constexpr int kFewestQueriesPerItem = 24;
constexpr int64_t kItemsPerThread = 4;

// One buffer a thread, as large as the largest item it has had.
class ThreadScratch {
public:
    void* at_least(size_t num_bytes) {
        if (num_bytes > num_bytes_) {
            num_bytes_ = (num_bytes + 63) / 64 * 64;
            buffer_.reset(std::aligned_alloc(64, num_bytes_));
            if (!buffer_) {
                num_bytes_ = 0;
                throw std::bad_alloc();
            }
        }
        return buffer_.get();
    }

private:
    struct Free {
        void operator()(void* pointer) const { std::free(pointer); }
    };
    std::unique_ptr<void, Free> buffer_;
    size_t num_bytes_ = 0;
};

}  // namespace

void Plan::make(
    const Step& step, const Pool& pool, int num_heads, int sliding_window, RowChoice choice) {
    step_ = step;
    pool_ = pool;
    num_heads_ = num_heads;
    sliding_window_ = sliding_window;
    choice_ = choice;
    const int group_size = num_heads / pool.num_kv_heads;
    const int64_t num_rows = choice.rows == nullptr ? step.num_tokens : choice.num_rows;
    const int num_threads = ThreadPool::instance().num_threads();
    int queries = kMostQueriesPerItem;
    while (queries > kFewestQueriesPerItem
        && num_rows * num_heads < kItemsPerThread * num_threads * queries) {
        queries /= 2;
    }
    rows_per_item_ = std::max(1, queries / group_size);

    // What is costliest comes first, so that no thread is left with it at the end: the requests
    // with the longest contexts, and of each request the rows that see most.
    requests_.resize(step.num_requests);
    std::iota(requests_.begin(), requests_.end(), 0);
    std::sort(requests_.begin(), requests_.end(), [&](int32_t a, int32_t b) {
        const int32_t left = step.context_lens[a], right = step.context_lens[b];
        return left != right ? left > right : a < b;
    });
    items_.clear();
    for (int32_t request : requests_) add_request(request);

    int most_rows = 0;
    for (const WorkItem& item : items_) most_rows = std::max(most_rows, item.num_rows);
    scratch_bytes_ = Scratch(nullptr, most_rows * group_size, pool.head_dim).num_bytes;
}

void Plan::add_request(int32_t request) {
    const int32_t first = step_.query_start[request], last = step_.query_start[request + 1];
    if (choice_.rows == nullptr) {
        add_rows(request, 0, last - first);
        return;
    }
    const int64_t* chosen = std::lower_bound(choice_.rows, choice_.rows + choice_.num_rows, last);
    while (chosen != choice_.rows && chosen[-1] >= first) {
        const int64_t end = *--chosen + 1;
        int64_t start = end - 1;
        while (chosen != choice_.rows && chosen[-1] == start - 1 && start > first) {
            start = *--chosen;
        }
        add_rows(request, static_cast<int32_t>(start - first), static_cast<int32_t>(end - first));
    }
}

void Plan::add_rows(int32_t request, int32_t first_row, int32_t last_row) {
    for (int32_t end = last_row; end > first_row; end -= rows_per_item_) {
        const int32_t start = std::max(first_row, end - rows_per_item_);
        for (int head = 0; head < pool_.num_kv_heads; ++head) {
            items_.push_back({
                .request = request,
                .first_head = head,
                .num_heads = 1,
                .first_row = start,
                .num_rows = end - start,
                .first_run = 0,
                .last_run = INT32_MAX / kRunKeys,
                .shared = -1,
            });
        }
    }
}

void attend(Plan& plan, int layer, const QueryRows& query, void* out, float scale,
    Variant variant) {
    const Step& step = plan.step_;
    const Pool& pool = plan.pool_;
    const int64_t layer_elements =
        int64_t{2} * pool.num_kv_heads * pool.block_size * pool.head_dim;
    const Call call{
        .query = query.data,
        .query_row_stride = query.row_stride,
        .query_head_stride = query.head_stride,
        .out = out,
        .layer_pool = static_cast<const char*>(pool.data)
            + layer * layer_elements * (pool.is_bfloat16 ? 2 : 4),
        .block_stride = pool.num_layers * layer_elements,
        .query_start = step.query_start,
        .context_lens = step.context_lens,
        .block_tables = step.block_tables,
        .table_stride = step.table_stride,
        .num_heads = plan.num_heads_,
        .num_kv_heads = pool.num_kv_heads,
        .head_dim = pool.head_dim,
        .block_size = pool.block_size,
        .scale = scale,
        .sliding_window = plan.sliding_window_,
    };
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant, Kernels);
    const KernelsOfType& kernel = pool.is_bfloat16 ? kernels.bfloat16 : kernels.float32;
    ThreadPool::instance().parallel_for(static_cast<int64_t>(plan.items_.size()), [&](int64_t i) {
        static thread_local ThreadScratch scratch;
        kernel.attend(call, plan.items_[i], scratch.at_least(plan.scratch_bytes_), nullptr);
    });
}

}  // namespace pdserve::attention
