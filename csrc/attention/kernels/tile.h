// One tile of keys and values: pointers to its rows in the paged pool, and its prefetcher.
#pragma once

#include "kernel.h"
#include "../../isa/simd.h"
#include "state.h"
#include "store/stored_rows.h"

namespace pdserve::attention {
namespace {

// The operand of scores and sums: pairs of bfloat16 if the CPU can multiply them, else float32.
template <class T>
struct Unit {
    using type = float;
    static constexpr bool is_pair = false;
};
#if defined(PDSERVE_HAS_PAIRS) || defined(PDSERVE_TILES)
template <>
struct Unit<BFloat16> {
    using type = uint32_t;
    static constexpr bool is_pair = true;
};
#endif

PDSERVE_INLINE uint32_t pair_of(BFloat16 low, BFloat16 high) {
    return low.bits | static_cast<uint32_t>(high.bits) << 16;
}

// A tile of a KV head.
struct Place {
    int head;
    int tile_start;
};

constexpr int kLineBytes = 64;

// How many cache lines of the next tile are prefetched at a time, in each stage of the current one.
// They are spread evenly over the work of few queries, which waits for memory most. A stage
// prefetches once for: each quarter of a block of keys that is transposed; each unit of head_dim,
// or quad of 16 keys, that is scored; each vector of scores that is scaled or turned into weights;
// each unit of values that is added.
constexpr int kLinesAtPackingForOne = 5;
constexpr int kLinesAtPacking = 2;
constexpr int kLinesAtScoring = 3;
constexpr int kLinesAtQuad = 3;
constexpr int kLinesAtWeighing = 4;
constexpr int kLinesAtAdding = 3;

// Prefetches a tile, a few lines at a time. If all lines were requested at once, the core would
// stall: it can have only a few cache misses in flight.
class Prefetcher {
    static constexpr int kPageBytes = 4096;
    static constexpr int kHeadLines = 3;

public:
    void reset() {
        count_ = next_ = 0, at_ = end_ = nullptr;
        set_pace(1);
    }

    // From now on only one in `num_calls` calls prefetches: the queries are processed a few at a
    // time, and each group passes over the whole tile.
    void set_pace(int num_calls) { pace_ = calls_left_ = num_calls; }

    void add(const void* start, int64_t num_bytes) {
        spans_[count_++] = {static_cast<const char*>(start), num_bytes};
    }

    template <int kNumLines>
    PDSERVE_INLINE void ask() {
        if (--calls_left_ > 0) return;
        calls_left_ = pace_;
        if (end_ - at_ < kNumLines * kLineBytes) {
            ask_rest_of(kNumLines);
            return;
        }
        prefetch(at_, kNumLines * kLineBytes);
        at_ += kNumLines * kLineBytes;
    }

    void ask_rest() { ask_rest_of(INT32_MAX); }

    // Prefetches the beginning of each page, which sets off the CPU's own prefetcher, and no more.
    void ask_heads() {
        for (int i = 0; i < count_; ++i) {
            const char* end = spans_[i].start + spans_[i].num_bytes;
            for (const char* at = spans_[i].start; at < end; at += kPageBytes) {
                prefetch(at, kHeadLines * kLineBytes);
            }
        }
        count_ = next_ = 0;
    }

private:
    PDSERVE_INLINE void ask_rest_of(int num_lines) {
        if (at_ < end_ || next_ < count_) ask_slowly(num_lines);
    }

    // Also moves on to the next span.
    [[gnu::noinline]] void ask_slowly(int num_lines) {
        for (; num_lines > 0; --num_lines) {
            if (at_ >= end_) {
                if (next_ == count_) return;
                at_ = spans_[next_].start;
                end_ = at_ + spans_[next_].num_bytes;
                ++next_;
            }
            prefetch(at_, 1);
            at_ += kLineBytes;
        }
    }

    struct Span {
        const char* start;
        int64_t num_bytes;
    };
    Span spans_[2 * kTileKeys];
    int count_ = 0;
    int next_ = 0;
    int pace_ = 1;
    int calls_left_ = 1;
    const char* at_ = nullptr;
    const char* end_ = nullptr;
};

// Rows of type T: as the pool has them.
template <class T>
struct TileRows {
    // Pointers for keys that no query sees are arbitrary valid ones; those for such values point to
    // zeros.
    const T* keys[kTileKeys];
    const T* values[kTileKeys];
    int first;  // keys [first, last) of the tile are seen by at least one query
    int last;
    Prefetcher prefetcher;

    // The item sees the positions [first_key, last_key).
    void gather(const Call& call, int request, Place place, int first_key, int last_key,
        const T* zero_row) {
        const int start = place.tile_start;
        first = first_key > start ? first_key - start : 0;
        last = last_key - start < kTileKeys ? last_key - start : kTileKeys;
        prefetcher.reset();
        const int32_t* table = call.block_tables + request * call.table_stride;
        const int64_t head_elements = call.block_size * call.row_elements;
        const int64_t value_offset = call.value_offset;
        const T* head_pool = static_cast<const T*>(call.layer_pool) + place.head * head_elements;
        int k = 0;
        const int skipped = (start + first) / call.block_size * call.block_size - start;
        for (; k < skipped; ++k) keys[k] = values[k] = zero_row;
        for (int block = (start + first) / call.block_size; k < last; ++block) {
            const int offset = start + k - block * call.block_size;
            const T* key = head_pool + table[block] * call.block_stride
                + offset * call.row_elements;
            const int left = k + call.block_size - offset;
            const int end = left < kTileKeys ? left : kTileKeys;
            const int seen_from = k < first ? first : k, seen_to = end < last ? end : last;
            const T* seen = key + (seen_from - k) * call.row_elements;
            const int64_t num_bytes = sizeof(T) * call.row_elements * (seen_to - seen_from);
            prefetcher.add(seen, num_bytes);
            if (value_offset != 0) prefetcher.add(seen + value_offset, num_bytes);
            for (; k < end; ++k, key += call.row_elements) {
                keys[k] = key;
                values[k] = key + value_offset;
            }
        }
        for (int unseen = 0; unseen < first; ++unseen) values[unseen] = zero_row;
        for (int unseen = last > 0 ? last : 0; unseen < k; ++unseen) values[unseen] = zero_row;
        for (; k < kTileKeys; ++k) keys[k] = values[k] = zero_row;
    }
};

}  // namespace
}  // namespace pdserve::attention
