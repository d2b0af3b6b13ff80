#include "group.h"

#include "slot.h"

namespace pdserve::ranks {

using std::chrono::microseconds;
using Clock = std::chrono::steady_clock;

struct Group::Control {
    alignas(64) Loss loss;
    alignas(64) std::atomic<uint32_t> num_ready;
    alignas(64) Counter steps;
    alignas(64) Counter layers;
    alignas(64) Meeting ends;
};

size_t Group::memory_bytes(const std::vector<int>& stages) {
    static_assert(sizeof(Control) <= kControlBytes);
    return place_of(0, stages).links + (stages.size() - 1) * StageLink::memory_bytes();
}

Group::Place Group::place_of(int rank, const std::vector<int>& stages) {
    Place place{.stage = 0, .rank = 0, .tensor = 0, .links = kControlBytes, .num_ranks = 0};
    for (size_t stage = 0; stage < stages.size(); ++stage) {
        if (rank >= place.num_ranks) {
            place.stage = static_cast<int>(stage);
            place.rank = rank - place.num_ranks;
            place.tensor = place.links;
        }
        place.links += TensorRanks::memory_bytes(stages[stage]);
        place.num_ranks += stages[stage];
    }
    return place;
}

Group::Group(char* memory, int rank, const std::vector<int>& stages)
    : Group(memory, rank, stages, place_of(rank, stages)) {}

Group::Group(char* memory, int rank, const std::vector<int>& stages, const Place& place)
    : control_(*reinterpret_cast<Control*>(memory)),
      rank_(rank),
      num_ranks_(place.num_ranks),
      tensor_(memory + place.tensor, place.rank, stages[place.stage], control_.loss) {
    const auto link_to = [&](int stage) {
        char* const link = memory + place.links + (stage - 1) * StageLink::memory_bytes();
        return StageLink(link, stages[stage], control_.loss);
    };
    if (place.stage > 0) before_.emplace(link_to(place.stage));
    if (place.stage + 1 < static_cast<int>(stages.size())) next_.emplace(link_to(place.stage + 1));
}

void Group::say_ready() { control_.num_ready.fetch_add(1); }

bool Group::wait_ready(microseconds most) {
    const auto end = Clock::now() + most;
    const auto all = static_cast<uint32_t>(num_ranks_);
    for (;;) {
        control_.loss.check();
        const uint32_t now = control_.num_ready.load();
        if (now >= all) return true;
        if (Clock::now() >= end) return false;
        futex_wait(control_.num_ready, now, std::chrono::milliseconds(5));
    }
}

void Group::begin_step() {
    control_.layers.set(0);  // nobody computes
    control_.steps.set(control_.steps.get() + 1);
}

uint32_t Group::wait_step(uint32_t last) {
    control_.steps.await_change(last, control_.loss);
    return control_.steps.get();
}

void Group::tell_layers(int64_t num_layers) {
    control_.layers.set(static_cast<uint32_t>(num_layers));
}

void Group::follow_layers(
    int64_t first, int64_t last, const std::function<void(int64_t)>& written) {
    uint32_t told = 0;
    for (int64_t next = first + 1; next <= last;) {
        control_.layers.await_rank(told, control_.loss);
        told = control_.layers.get();
        for (; next <= told; ++next) written(next);
    }
}

void Group::end_step() { control_.ends.meet(num_ranks_, control_.loss); }

void Group::give_up() { control_.loss.declare(); }

bool Group::is_lost() const { return control_.loss.is_declared(); }

}  // namespace pdserve::ranks
