// The way through a work item: head by head, tile by tile, run by run, one tile ahead.
#pragma once

#include "seeing.h"
#include "tile.h"

namespace pdserve::attention {
namespace {

// T is what rows of the pool are of, and Sums what computes: of a head, it is told where runs begin and end, and is given their tiles
// in ascending order.
//     void begin_head(int head);
//     void begin_run(float* state);         // null: in its own memory
//     void add_tile(int tile_start, const TileRows<T>& tile, TileRows<T>& next);
//     void end_run(float* state, int run);  // writes its state; with null, folds the run
//     void fold(float* state, int run);     // a state that end_run has written
//     void write_out(int head);             // what has been folded since begin_head or reset
template <class T, class Sums>
class Walk {
public:
    // zero_row: [head_dim] zeros.
    Walk(const Call& call, const WorkItem& item, const Seeing& seeing, const T* zero_row,
        size_t state_floats)
        : call_(call),
          item_(item),
          seeing_(seeing),
          zero_row_(zero_row),
          state_floats_(state_floats) {}

    // With null, the result is written out; else the state of each run to `states`.
    void run(Sums& sums, float* states) const {
        TileRows<T> tiles[2];
        TileRows<T>*current = &tiles[0], *next = &tiles[1];
        Place place{item_.first_head, first_tile()};
        gather(place, *current);
        while (place.head < item_.first_head + item_.num_heads) {
            const Place next_place = after(place);
            gather(next_place, *next);
            if (place.tile_start == first_tile()) sums.begin_head(place.head);
            if (place.tile_start == first_tile() || place.tile_start % kRunKeys == 0) {
                sums.begin_run(states);
            }
            sums.add_tile(place.tile_start, *current, *next);
            next->prefetcher.ask_rest();
            const bool ends_head = next_place.head != place.head;
            if (ends_head || next_place.tile_start % kRunKeys == 0) {
                sums.end_run(states, place.tile_start / kRunKeys);
                if (states != nullptr) states += state_floats_;
            }
            if (ends_head && states == nullptr) sums.write_out(place.head);
            TileRows<T>* processed = current;
            current = next;
            next = processed;
            place = next_place;
        }
    }

    // Writes the output from the states of all runs; the item must be the whole one, with all runs.
    void run_folded(Sums& sums, const float* states) const {
        float* state = const_cast<float*>(states);
        for (int run = seeing_.first_key / kRunKeys; run * kRunKeys < seeing_.last_key; ++run) {
            sums.fold(state, run);
            state += state_floats_;
        }
        sums.write_out(item_.first_head);
    }

    int first_head() const { return item_.first_head; }

private:
    int first_tile() const {
        const int start = item_.first_run * kRunKeys;
        return (start > seeing_.first_key ? start : seeing_.first_key) / kTileKeys * kTileKeys;
    }

    int last_key() const {
        const int64_t end = static_cast<int64_t>(item_.last_run) * kRunKeys;
        return end < seeing_.last_key ? static_cast<int>(end) : seeing_.last_key;
    }

    Place after(Place place) const {
        const int start = place.tile_start + kTileKeys;
        return start < last_key() ? Place{place.head, start} : Place{place.head + 1, first_tile()};
    }

    void gather(Place place, TileRows<T>& tile) const {
        const bool is_past_end = place.head == item_.first_head + item_.num_heads;
        tile.gather(call_, item_.request, place, seeing_.first_key,
            is_past_end ? 0 : seeing_.last_key, zero_row_);
    }

    const Call& call_;
    const WorkItem& item_;
    const Seeing& seeing_;
    const T* const zero_row_;
    const size_t state_floats_;
};

}  // namespace
}  // namespace pdserve::attention
