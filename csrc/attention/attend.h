// Paged attention for one work item: the one kernel for prefill chunks and decode steps.
//
// Flash attention over tiles of 64 keys at aligned positions. A tile is processed as:
//   gather    pointers to its K and V rows, through the block table
//   pack      K transposed, so that keys stand side by side; the next tile's rows are prefetched
//   score     queries x keys
//   weigh     the mask, then one step of the online softmax, in float32
//   add       weights x values onto the running sums
// Queries are (row, head of the group) pairs, so each K and V row is read once for all of them.
//
// Never checks anything: launch.cpp has.
#pragma once

#include "kernel.h"
#include "microkernels.h"
#include "scratch.h"
#include "../simd.h"
#include "tile.h"

namespace pdserve::attention {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMinusInfinity = -__builtin_inff();

template <class T>
class Attend {
    using Unit = typename ScoreUnit<T>::type;

public:
    Attend(const Call& call, const WorkItem& item, void* buffer)
        : call_(call),
          item_(item),
          group_size_(call.num_heads / call.num_kv_heads),
          num_queries_(item.num_rows * group_size_),
          padded_dim_(padded_head_dim(call.head_dim)),
          first_row_(call.query_start[item.request] + item.first_row),
          scratch_(buffer, num_queries_, call.head_dim) {
        const int rows_left = call.query_start[item.request + 1] - first_row_;
        first_position_ = call.context_lens[item.request] - rows_left;
        last_key_ = first_position_ + item.num_rows;
        const int window = call.sliding_window;
        const bool is_cut = window > 0 && first_position_ >= window;
        first_key_ = is_cut ? first_position_ - window + 1 : 0;
    }

    void run() {
        load_queries();
        reset_sums();
        TileRows<T> tiles[2];
        TileRows<T>*current = &tiles[0], *next = &tiles[1];
        int tile_start = first_key_ / kTileKeys * kTileKeys;
        gather(tile_start, *current);
        for (; tile_start < last_key_; tile_start += kTileKeys) {
            gather(tile_start + kTileKeys, *next);
            process(tile_start, *current, *next);
            TileRows<T>* processed = current;
            current = next;
            next = processed;
        }
        write_out();
    }

private:
    struct Range {
        int first;
        int last;
    };

    void load_queries() {
        for (int q = 0; q < num_queries_; ++q) {
            const int64_t row = first_row_ + q / group_size_;
            const int64_t head = item_.kv_head * group_size_ + q % group_size_;
            const T* source = static_cast<const T*>(call_.query) + row * call_.query_row_stride
                + head * call_.query_head_stride;
            Unit* target = queries() + static_cast<int64_t>(q) * padded_dim_;
            for (int u = 0; u < num_units(); ++u) {
                if constexpr (ScoreUnit<T>::is_pair) {
                    target[u] = pair_of(source, 2 * u, call_.head_dim);
                } else {
                    target[u] = to_float(source[u]);
                }
            }
        }
    }

    void reset_sums() {
        const size_t num_queries = num_queries_;
        __builtin_memset(scratch_.sums, 0, num_queries * padded_dim_ * sizeof(float));
        __builtin_memset(scratch_.totals, 0, num_queries * kSumLanes * sizeof(float));
        __builtin_memset(scratch_.zero_row, 0, padded_dim_ * sizeof(float));
        for (int q = 0; q < num_queries_; ++q) scratch_.maxima[q] = kMinusInfinity;
    }

    void gather(int tile_start, TileRows<T>& tile) {
        const T* zero_row = reinterpret_cast<const T*>(scratch_.zero_row);
        tile.gather(call_, item_, tile_start, first_key_, last_key_, zero_row);
    }

    void process(int tile_start, const TileRows<T>& tile, const TileRows<T>& next) {
        const Range seeing = queries_seeing(tile_start);
        const int num_keys = (tile.last + kTransposeSize - 1) / kTransposeSize * kTransposeSize;
        for (int k = 0; k < num_keys; k += kTransposeSize) {
            pack_16_keys(tile.keys + k, next.keys + k, call_.head_dim, packed_keys() + k);
        }
        score(seeing, num_keys);
        for (int q = seeing.first; q < seeing.last; ++q) weigh(q, tile_start, num_keys);
        add(seeing, tile, next);
    }

    // Each of these queries sees at least one key of the tile, so no softmax step is empty.
    Range queries_seeing(int tile_start) const {
        Range rows{tile_start - first_position_, item_.num_rows};
        if (rows.first < 0) rows.first = 0;
        if (call_.sliding_window > 0) {
            const int64_t end = static_cast<int64_t>(tile_start) + kTileKeys - 1
                + call_.sliding_window - first_position_;
            if (end < rows.last) rows.last = static_cast<int>(end);
        }
        return {rows.first * group_size_, rows.last * group_size_};
    }

    void score(Range seeing, int num_keys) {
        for_queries(seeing.first, seeing.last, [&](int q, auto num_queries) {
            constexpr int kQueries = num_queries.value;
            const Unit* query = queries() + static_cast<int64_t>(q) * padded_dim_;
            float* scores = scratch_.scores + q * kTileKeys;
            for_columns<columns_for(kQueries)>(num_keys / kLanes, [&](int column, auto num) {
                const int k = column * kLanes;
                score_keys<kQueries, num.value>(
                    query, padded_dim_, packed_keys() + k, num_units(), scores + k);
            });
        });
    }

    // Turns the scores of a query into weights: 2 ** (score * scale * log2(e) - maximum).
    void weigh(int q, int tile_start, int num_keys) {
        float* scores = scratch_.scores + q * kTileKeys;
        mask(scores, first_position_ + q / group_size_, tile_start, num_keys);
        const FloatLanes scale = splat(call_.scale * kLog2E);
        FloatLanes largest = splat(scratch_.maxima[q]);
        for (int k = 0; k < num_keys; k += kLanes) {
            const FloatLanes scaled = load(scores + k) * scale;
            store(scores + k, scaled);
            largest = max_of(largest, scaled);
        }
        const FloatLanes maximum = splat(largest_of(largest));
        const FloatLanes decay = exp2_of_nonpositive(splat(scratch_.maxima[q]) - maximum);
        scratch_.maxima[q] = maximum[0];
        scratch_.decays[q] = decay[0];
        for (int lane = 0; lane < kSumLanes; lane += kLanes) {
            float* totals = scratch_.totals + q * kSumLanes + lane;
            FloatLanes total = load(totals) * decay;
            for (int k = lane; k < num_keys; k += kSumLanes) {
                const FloatLanes weight = exp2_of_nonpositive(load(scores + k) - maximum);
                store(scores + k, weight);
                total += weight;
            }
            store(totals, total);
        }
    }

    void mask(float* scores, int position, int tile_start, int num_keys) const {
        const int last = position + 1 - tile_start;
        for (int k = last; k < num_keys; ++k) scores[k] = kMinusInfinity;
        if (call_.sliding_window == 0) return;
        const int first = position - call_.sliding_window + 1 - tile_start;
        for (int k = 0; k < first; ++k) scores[k] = kMinusInfinity;
    }

    void add(Range seeing, const TileRows<T>& tile, const TileRows<T>& next) {
        const int64_t offset = static_cast<int64_t>(call_.num_kv_heads) * call_.block_size
            * call_.head_dim;
        const bool has_padding = padded_dim_ != call_.head_dim;
        // Converting once pays as soon as the values are gone through several times.
        const bool converts = sizeof(T) != sizeof(float) && num_queries_ > 2 * kMaxQueries;
        if (!has_padding && !converts) {
            add_rows(seeing, ValueRows<T>{tile.keys, next.keys, offset, tile.first, tile.last});
            return;
        }
        const float* rows[kTileKeys];
        for (int k = tile.first; k < tile.last; ++k) {
            const T* source = tile.keys[k] + offset;
            float* row = scratch_.values + k * padded_dim_;
            for (int d = 0; d < call_.head_dim; ++d) row[d] = to_float(source[d]);
            for (int d = call_.head_dim; d < padded_dim_; ++d) row[d] = 0.0f;
            rows[k] = row;
        }
        add_rows(seeing, ValueRows<float>{rows, rows, 0, tile.first, tile.last});
    }

    template <class Value>
    void add_rows(Range seeing, const ValueRows<Value>& values) {
        for_queries(seeing.first, seeing.last, [&](int q, auto num_queries) {
            constexpr int kQueries = num_queries.value;
            const float* weights = scratch_.scores + q * kTileKeys;
            float* sums = scratch_.sums + static_cast<int64_t>(q) * padded_dim_;
            for_columns<columns_for(kQueries)>(padded_dim_ / kLanes, [&](int column, auto num) {
                add_values<kQueries, num.value>(weights, values, column * kLanes,
                    scratch_.decays + q, sums, padded_dim_);
            });
        });
    }

    void write_out() {
        for (int q = 0; q < num_queries_; ++q) {
            float total = 0.0f;
            for (int i = 0; i < kSumLanes; ++i) total += scratch_.totals[q * kSumLanes + i];
            const float reciprocal = 1.0f / total;
            const int64_t row = first_row_ + q / group_size_;
            const int64_t head = item_.kv_head * group_size_ + q % group_size_;
            const float* sums = scratch_.sums + static_cast<int64_t>(q) * padded_dim_;
            T* out = static_cast<T*>(call_.out) + (row * call_.num_heads + head) * call_.head_dim;
            for (int d = 0; d < call_.head_dim; ++d) assign(out[d], sums[d] * reciprocal);
        }
    }

    int num_units() const {
        return ScoreUnit<T>::is_pair ? (call_.head_dim + 1) / 2 : call_.head_dim;
    }
    Unit* queries() { return reinterpret_cast<Unit*>(scratch_.queries); }
    Unit* packed_keys() { return reinterpret_cast<Unit*>(scratch_.packed_keys); }

    const Call& call_;
    const WorkItem& item_;
    const int group_size_;
    const int num_queries_;
    const int padded_dim_;
    const int first_row_;  // in the batch
    Scratch scratch_;
    int first_position_;  // of the first row
    int first_key_;       // keys [first_key_, last_key_) are seen by at least one row
    int last_key_;
};

template <class T>
void attend(const Call& call, const WorkItem& item, void* scratch) {
    Attend<T>(call, item, scratch).run();
}

}  // namespace
}  // namespace pdserve::attention
