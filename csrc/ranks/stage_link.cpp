#include "stage_link.h"

#include <cstring>

#include "slot.h"

namespace pdserve::ranks {

namespace {
constexpr uint32_t kSlots = 2;
}

struct StageLink::Control {
    alignas(64) Counter given;
    alignas(64) Counter taken;                      // by all takers
    alignas(64) std::atomic<uint32_t> takers[kSlots];  // that have what is in the slot
};

size_t StageLink::memory_bytes() {
    static_assert(sizeof(Control) <= kControlBytes);
    return kControlBytes + kSlots * kSlotBytes;
}

StageLink::StageLink(char* memory, int num_takers, Loss& loss)
    : control_(*reinterpret_cast<Control*>(memory)),
      slots_(memory + kControlBytes),
      num_takers_(num_takers),
      loss_(loss) {}

void StageLink::give(const float* rows, int64_t num_floats) {
    for (uint32_t taken; number_ - (taken = control_.taken.get()) >= kSlots;) {
        control_.taken.await_rank(taken, loss_);
    }
    std::memcpy(slot_at(slots_, number_ % kSlots), rows, num_floats * sizeof(float));
    control_.given.set(++number_);
}

// Nobody is a slot ahead of a taker that has not had it, so the last to take one is the last to have
// taken all before.
void StageLink::take(float* rows, int64_t num_floats) {
    if (control_.given.get() == number_) control_.given.await_rank(number_, loss_);
    const uint32_t slot = number_ % kSlots;
    std::memcpy(rows, slot_at(slots_, slot), num_floats * sizeof(float));
    ++number_;
    if (control_.takers[slot].fetch_add(1) + 1 < num_takers_) return;
    control_.takers[slot].store(0);
    control_.taken.set(number_);
}

}  // namespace pdserve::ranks
