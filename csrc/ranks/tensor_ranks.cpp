#include "tensor_ranks.h"

#include <algorithm>

#include "../threads/thread_pool.h"

namespace pdserve::ranks {

namespace {
constexpr int64_t kElementsPerItem = 16 * 1024;
static_assert(sizeof(Meeting) <= kControlBytes);
}  // namespace

size_t TensorRanks::memory_bytes(int num_ranks) {
    return kControlBytes + 2 * num_ranks * kSlotBytes;
}

TensorRanks::TensorRanks(char* memory, int rank, int num_ranks, Loss& loss)
    : meeting_(*reinterpret_cast<Meeting*>(memory)),
      slots_(memory + kControlBytes),
      rank_(rank),
      num_ranks_(num_ranks),
      loss_(loss) {}

void TensorRanks::meet() { meeting_.meet(num_ranks_, loss_); }

void TensorRanks::sum(float* target, int64_t num_rows, int64_t width, bool adds) {
    meet();
    const int64_t num_elements = num_rows * width;
    const int64_t num_items = (num_elements + kElementsPerItem - 1) / kElementsPerItem;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t first = item * kElementsPerItem;
        const int64_t count = std::min(num_elements - first, kElementsPerItem);
        float* to = target + first;
        if (!adds) std::fill_n(to, count, 0.0f);
        for (int rank = 0; rank < num_ranks_; ++rank) {
            const float* from = slot(rank) + first;
            for (int64_t i = 0; i < count; ++i) to[i] += from[i];
        }
    });
    turn_ = 1 - turn_;
}

}  // namespace pdserve::ranks
