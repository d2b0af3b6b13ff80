// Which keys each query may see: causal attention, perhaps with a sliding window, for consecutive
// rows.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "../../isa/simd.h"

namespace pdserve::attention {
namespace {

struct Range {
    int first;
    int last;
};

// The queries of a work item are (row, head of the group) pairs, rows first.
struct Seeing {
    int group_size;
    int num_rows;
    int window;          // 0: none
    int first_row;       // in the batch
    int first_position;  // of the first row
    int first_key;       // keys [first_key, last_key) are seen by at least one row
    int last_key;

    Seeing(const Call& call, const WorkItem& item)
        : group_size(call.num_heads / call.num_kv_heads),
          num_rows(item.num_rows),
          window(call.sliding_window),
          first_row(call.query_start[item.request] + item.first_row) {
        const int rows_left = call.query_start[item.request + 1] - first_row;
        first_position = call.context_lens[item.request] - rows_left;
        last_key = first_position + num_rows;
        const bool is_cut = window > 0 && first_position >= window;
        first_key = is_cut ? first_position - window + 1 : 0;
    }

    PDSERVE_INLINE int position(int query) const { return first_position + query / group_size; }

    // The queries that see at least one of the keys [first, last). So no softmax step is empty.
    Range queries(int first, int last) const {
        Range rows{first - first_position, num_rows};
        if (rows.first < 0) rows.first = 0;
        if (window > 0) {
            const int64_t end = static_cast<int64_t>(last) - 1 + window - first_position;
            if (end < rows.last) rows.last = static_cast<int>(end);
        }
        return {rows.first * group_size, rows.last * group_size};
    }

    // The keys of a tile that a query sees, counted from the start of the tile.
    PDSERVE_INLINE Range keys(int query, int tile_start) const {
        const int last = position(query) + 1 - tile_start;
        return {window > 0 ? last - window : 0, last};
    }
};

}  // namespace
}  // namespace pdserve::attention
