// Paged attention of bfloat16 through tiles (isa/amx.h). As in attend.h, for prefill chunks and
// decode steps alike, in tiles of 64 keys; but for 16 queries at a time, one in each lane.
//
// Scores are keys x queries, so that keys are read as they lie in the pool. With many queries, one
// in each lane, the softmax needs nothing across lanes, and its weights are transposed; with few,
// the scores are. Both compute the same: the weights are added up by a column of ones beside the
// values. And what a query gets does not depend on the queries beside it: to a query that does not
// see a tile, the tile adds nothing, exactly.

#include "../../../isa/amx.h"
#include "../../../isa/build_name.h"
#include "../../../isa/tanh.h"
#include "../kernel.h"
#include "../pack.h"
#include "../walk.h"
#include "scratch.h"
#include "softmax.h"

namespace pdserve::attention {
namespace {


PDSERVE_INLINE bool is_finite(PairLanes pairs) {
    const PairLanes low = pairs & 0x7f80u, high = pairs & 0x7f800000u;
    return !any((IntLanes)(low == splat(uint32_t{0x7f80}))
        | (IntLanes)(high == splat(uint32_t{0x7f800000})));
}

// Rows of the pool are of type S. Those of codes are made bfloat16 as they are brought, since all
// of them are copied anyway.
template <class S>
class TileAttend {
public:
    TileAttend(const Call& call, const WorkItem& item, void* buffer)
        : call_(call),
          seeing_(call, item),
          num_queries_(item.num_rows * seeing_.group_size),
          num_tiles_(whole_tiles_of_queries(num_queries_)),
          padded_dim_(padded_head_dim(call.head_dim)),
          num_columns_(num_columns(call.head_dim)),
          tiled_dim_(tiled_head_dim(call.head_dim)),
          keys_in_place_(kIsCoded<S> || (tiled_dim_ == call.head_dim && call.block_size % 16 == 0)),
          scratch_(buffer, num_queries_, call.head_dim),
          run_(TileState::at(scratch_.run, num_queries_, call.head_dim)),
          result_(TileState::at(scratch_.result, num_queries_, call.head_dim)),
          softmax_(call, scratch_, run_.maxima, num_queries_),
          walk_(call, item, seeing_, reinterpret_cast<const S*>(scratch_.zero_row),
              shared_state_size(num_queries_, call.head_dim)) {
        __builtin_memset(scratch_.zero_row, 0, tiled_dim_ * sizeof(float));
        for (int q = 0; q < num_tiles_ * kTileQueries; ++q) {
            scratch_.positions[q] = seeing_.position(q < num_queries_ ? q : num_queries_ - 1);
        }
        __builtin_memset(scratch_.weights, 0, kTileQueries * kTileKeys * sizeof(BFloat16));
        auto* values = reinterpret_cast<uint32_t*>(scratch_.values);
        for (int i = 0; i < kPairs; ++i, values += num_columns_) {
            __builtin_memset(values + padded_dim_, 0, 16 * sizeof(uint32_t));
            values[padded_dim_] = 0x3f803f80;  // ones
        }
    }

    void run(float* states) { walk_.run(*this, states); }

    void run_folded(const float* states) {
        begin_result(walk_.first_head());
        walk_.run_folded(*this, states);
    }

private:
    friend class Walk<S, TileAttend>;

    // As in attend.h. The denominator is a column of its own.
    void begin_result(int head) {
        reset(result_);
        if (call_.sinks == nullptr) return;
        for (int q = 0; q < num_queries_; ++q) {
            result_.maxima[q] = sink_score(call_, seeing_, head, q);
            result_.sums[static_cast<int64_t>(q) * num_columns_ + padded_dim_] = 1.0f;
        }
    }

    void begin_head(int head) {
        begin_result(head);
        auto* tiles = reinterpret_cast<uint32_t*>(scratch_.query_tiles);
        __builtin_memset(tiles, 0, sizeof(float) * num_tiles_ * kTileQueries * tiled_dim_ / 2);
        for (int q = 0; q < num_queries_; ++q) {
            const BFloat16* source =
                static_cast<const BFloat16*>(call_.query) + query_offset(head, q);
            uint32_t* column = tiles + q / kTileQueries * kTileQueries * tiled_dim_ / 2
                + q % kTileQueries;
            int d = 0;
            for (; d + 2 <= call_.head_dim; d += 2) {
                column[d / 2 * kTileQueries] = pair_of(source[d], source[d + 1]);
            }
            if (d < call_.head_dim) column[d / 2 * kTileQueries] = pair_of(source[d], {0});
        }
    }

    int64_t query_offset(int kv_head, int q) const {
        const int64_t row = seeing_.first_row + q / seeing_.group_size;
        const int64_t head = kv_head * seeing_.group_size + q % seeing_.group_size;
        return row * call_.query_row_stride + head * call_.query_head_stride;
    }

    void begin_run(float*) { reset(run_); }

    void end_run(float* state, int run) {
        if (state == nullptr) {
            fold(scratch_.run, run);
        } else {
            __builtin_memcpy(state, scratch_.run,
                TileState::size(num_queries_, call_.head_dim) * sizeof(float));
        }
    }

    void reset(const TileState& state) const {
        const size_t queries = num_tiles_ * kTileQueries;
        __builtin_memset(state.sums, 0, queries * num_columns_ * sizeof(float));
        for (size_t q = 0; q < queries; ++q) state.maxima[q] = kMinusInfinity;
    }

    void add_tile(int tile_start, const TileRows<S>& tile, TileRows<S>& next) {
        next.prefetcher.ask_heads();
        if constexpr (kIsCoded<S>) {
            widen(tile);
            add(tile_start, widened_);
        } else {
            add(tile_start, tile);
        }
    }

    // Makes bfloat16 of codes: of keys without their scales, and as wide as tiles, so that they are
    // used in place; of values with them, since weights also add up to the denominator.
    void widen(const TileRows<S>& tile) {
        widened_.first = tile.first;
        widened_.last = tile.last;
        auto* keys = reinterpret_cast<BFloat16*>(scratch_.key_rows);
        auto* values = reinterpret_cast<BFloat16*>(scratch_.value_rows);
        for (int k = 0; k < kTileKeys; ++k, keys += tiled_dim_, values += padded_dim_) {
            widened_.keys[k] = keys;
            widened_.values[k] = values;
            const int head_dim = call_.head_dim;
            copy_row(tile.keys[k], head_dim, keys);
            scratch_.key_scales[k] = scale_of(tile.keys[k], head_dim);
            copy_row(tile.values[k], head_dim, values, scale_of(tile.values[k], head_dim));
            for (int d = head_dim; d < tiled_dim_; ++d) keys[d] = {0};
        }
    }

    void add(int tile_start, const TileRows<BFloat16>& tile) {
        const Range queries = seeing_.queries(tile_start, tile_start + kTileKeys);
        const int last = (queries.last + kTileQueries - 1) / kTileQueries;
        const int first = queries.first / kTileQueries;
        bring_keys(tile);
        bring_values(tile);
        for (int t = first; t < last; ++t) {
            const int last_position = scratch_.positions[t * kTileQueries + kTileQueries - 1];
            const int last_seen = last_position + 1 - tile_start;
            const int num_keys = last_seen < tile.last ? last_seen : tile.last;
            score(t, num_keys);
            if constexpr (kIsCoded<S>) apply_key_scales(num_keys);
            if (call_.cap > 0) {
                const SoftCap cap(call_.cap, call_.scale);
                cap.apply(scratch_.scores, num_keys * kTileQueries);
            }
            const bool all_seen = sees_all(t, tile, tile_start, num_keys);
            if (!all_seen || tile.first > 0) softmax_.mask(t, tile_start, num_keys);
            if (softmax_.weigh(t, num_keys)) decay_sums(t);
            if (all_seen || values_are_finite(tile)) {
                add_values(scratch_.values, num_keys, sums_of(t));
            } else {
                add_seen_values(t, tile_start, num_keys);
            }
        }
    }

    // Points at tiles of 16 keys as they lie in the pool, or copies them.
    void bring_keys(const TileRows<BFloat16>& tile) {
        for (int k = 0; k < tile.last; k += 16) {
            const BFloat16* const* keys = tile.keys + k;
            if (keys_in_place_) {
                keys_[k / 16] = {keys[0], (keys[1] - keys[0]) * int64_t{sizeof(BFloat16)}};
                continue;
            }
            auto* rows = reinterpret_cast<BFloat16*>(scratch_.key_rows) + k * tiled_dim_;
            keys_[k / 16] = {rows, tiled_dim_ * int64_t{sizeof(BFloat16)}};
            for (int i = 0; i < 16; ++i, rows += tiled_dim_) {
                __builtin_memcpy(rows, keys[i], call_.head_dim * sizeof(BFloat16));
                for (int d = call_.head_dim; d < tiled_dim_; ++d) rows[d] = {0};
            }
        }
    }

    // Pairs of keys; zeros for those that nobody sees.
    void bring_values(const TileRows<BFloat16>& tile) {
        auto* values = reinterpret_cast<uint32_t*>(scratch_.values);
        pack_values(tile, call_.head_dim, padded_dim_, num_columns_, values);
        const int first = tile.first / 2, end = (tile.last + 1) / 2;
        for (int i = 0; i < first; ++i) clear_values(values + i * num_columns_);
        for (int i = end; i < kPairs; ++i) clear_values(values + i * num_columns_);
    }

    void clear_values(uint32_t* row) const {
        __builtin_memset(row, 0, padded_dim_ * sizeof(uint32_t));
    }

    bool values_are_finite(const TileRows<BFloat16>& tile) const {
        const auto* values = reinterpret_cast<const uint32_t*>(scratch_.values);
        for (int i = tile.first / 2; i < (tile.last + 1) / 2; ++i) {
            for (int d = 0; d < padded_dim_; d += kLanes) {
                if (!is_finite(load(values + i * num_columns_ + d))) return false;
            }
        }
        return true;
    }

    // scores[k][q] = key k x query q, for whole tiles of keys.
    void score(int tile, int num_keys) {
        const auto* queries = reinterpret_cast<const char*>(scratch_.query_tiles)
            + static_cast<int64_t>(tile) * tiled_dim_ / 32 * kTileBytes;
        unrolled<kTilesOfKeys>([&](auto i) { tiles_.zero<i>(); });
        for (int d = 0; d < tiled_dim_; d += 32, queries += kTileBytes) {
            tiles_.load<4>(queries, kTileRowBytes);
            unrolled<kTilesOfKeys>([&](auto i) {
                if (i * 16 >= num_keys) return;
                tiles_.load<5 + i % 3>(keys_[i].rows + d, keys_[i].stride);
                tiles_.multiply_bfloat16<i, 5 + i % 3, 4>();
            });
        }
        unrolled<kTilesOfKeys>([&](auto i) {
            float* scores = scratch_.scores + i * 16 * kTileQueries;
            if (i * 16 < num_keys) tiles_.store<i>(scores, kTileQueries * sizeof(float));
        });
    }

    void apply_key_scales(int num_keys) const {
        float* scores = scratch_.scores;
        for (int k = 0; k < num_keys; ++k, scores += kTileQueries) {
            store(scores, load(scores) * splat(scratch_.key_scales[k]));
        }
    }

    // Do all queries of the tile see the keys [first, num_keys)?
    bool sees_all(int tile, const TileRows<BFloat16>& rows, int tile_start, int num_keys) const {
        const int32_t* positions = scratch_.positions + tile * kTileQueries;
        const int first_position = positions[0], last_position = positions[kTileQueries - 1];
        const bool begins_before = call_.sliding_window == 0
            || last_position - call_.sliding_window < tile_start + rows.first;
        return begins_before && first_position >= tile_start + num_keys - 1;
    }

    float* sums_of(int tile) const {
        return run_.sums + static_cast<int64_t>(tile) * kTileQueries * num_columns_;
    }

    void decay_sums(int tile) const {
        float* sums = sums_of(tile);
        const int num = num_queries_ < kTileQueries ? num_queries_ : kTileQueries;
        for (int q = 0; q < num; ++q, sums += num_columns_) {
            const FloatLanes decay = splat(scratch_.decays[q]);
            for (int d = 0; d < num_columns_; d += kLanes) store(sums + d, load(sums + d) * decay);
        }
    }

    // sums[q] += the sum over keys, ascending, of weights[q][k] values[k].
    void add_values(const float* values, int num_keys, float* sums) {
        int left = num_columns_ / 16;
        for (; left > 5; left -= 4, values += 64, sums += 64) {
            add_columns<4>(values, num_keys, sums);
        }
        switch (left) {
            case 2: add_columns<2>(values, num_keys, sums); break;
            case 3: add_columns<3>(values, num_keys, sums); break;
            case 4: add_columns<4>(values, num_keys, sums); break;
            default: add_columns<5>(values, num_keys, sums); break;
        }
    }

    template <int kColumns>
    PDSERVE_INLINE void add_columns(const float* values, int num_keys, float* sums) {
        const int64_t stride = num_columns_ * sizeof(float);
        unrolled<kColumns>([&](auto c) { tiles_.load<c>(sums + c * 16, stride); });
        for (int k = 0; k < num_keys; k += 32, values += 16 * num_columns_) {
            tiles_.load<5>(scratch_.weights + k / 2, kTileKeys * sizeof(BFloat16));
            unrolled<kColumns>([&](auto c) {
                tiles_.load<6 + c % 2>(values + c * 16, stride);
                tiles_.multiply_bfloat16<c, 5, 6 + c % 2>();
            });
        }
        unrolled<kColumns>([&](auto c) { tiles_.store<c>(sums + c * 16, stride); });
    }

    // Where a value is not finite, weight 0 is not enough for those who do not see it: 0 x NaN is
    // NaN. So position by position, with zeros for the values that it does not see.
    void add_seen_values(int tile, int tile_start, int num_keys) {
        const int32_t* positions = scratch_.positions + tile * kTileQueries;
        const size_t row_bytes = num_columns_ * sizeof(float);
        float* sums = sums_of(tile);
        for (int q = 0; q < kTileQueries;) {
            const int position = positions[q];
            keep_seen_values(position, tile_start, num_keys);
            __builtin_memcpy(scratch_.tile_sums, sums, kTileQueries * row_bytes);
            add_values(scratch_.seen_values, num_keys, scratch_.tile_sums);
            for (; q < kTileQueries && positions[q] == position; ++q) {
                __builtin_memcpy(
                    sums + q * num_columns_, scratch_.tile_sums + q * num_columns_, row_bytes);
            }
        }
    }

    void keep_seen_values(int position, int tile_start, int num_keys) const {
        const auto* values = reinterpret_cast<const uint32_t*>(scratch_.values);
        auto* seen = reinterpret_cast<uint32_t*>(scratch_.seen_values);
        const auto is_seen = [&](int k) {
            const int key = tile_start + k;
            return key <= position
                && (call_.sliding_window == 0 || key > position - call_.sliding_window);
        };
        for (int pair = 0; pair < (num_keys + 31) / 32 * 16; ++pair) {
            const uint32_t kept = (is_seen(2 * pair) ? 0xffffu : 0)
                | (is_seen(2 * pair + 1) ? 0xffff0000u : 0);
            for (int d = 0; d < num_columns_; ++d) {
                seen[pair * num_columns_ + d] = values[pair * num_columns_ + d] & kept;
            }
        }
    }

    // Folds the state of a run into that of all runs before it.
    void fold(float* state, int run) {
        const TileState from = TileState::at(state, num_queries_, call_.head_dim);
        const Range queries = seeing_.queries(run * kRunKeys, (run + 1) * kRunKeys);
        for (int q = queries.first; q < queries.last; ++q) fold_query(from, q);
    }

    // Never inlined, so that the result has the same bits for every caller.
    [[gnu::noinline]] void fold_query(const TileState& run, int q) const {
        const FloatLanes before = splat(result_.maxima[q]), now = splat(run.maxima[q]);
        const FloatLanes maximum = max_of(before, now);
        const FloatLanes decay = exp2_of_nonpositive(before - maximum);
        const FloatLanes weight = exp2_of_nonpositive(now - maximum);
        result_.maxima[q] = maximum[0];
        const int64_t first = static_cast<int64_t>(q) * num_columns_;
        const float* from = run.sums + first;
        float* to = result_.sums + first;
        for (int d = 0; d < num_columns_; d += kLanes) {
            store(to + d, multiply_add(load(to + d) * decay, load(from + d), weight));
        }
    }

    void write_out(int kv_head) const {
        for (int q = 0; q < num_queries_; ++q) {
            const float* sums = result_.sums + static_cast<int64_t>(q) * num_columns_;
            const FloatLanes reciprocal = splat(1.0f / sums[padded_dim_]);
            const int64_t row = seeing_.first_row + q / seeing_.group_size;
            const int64_t head = kv_head * seeing_.group_size + q % seeing_.group_size;
            BFloat16* out = static_cast<BFloat16*>(call_.out)
                + (row * call_.num_heads + head) * call_.head_dim;
            for (int d = 0; d < call_.head_dim; d += kLanes) {
                const FloatLanes values = load(sums + d) * reciprocal;
                if (d + kLanes <= call_.head_dim) {
                    store(out + d, values);
                } else {
                    BFloat16 rest[kLanes];
                    store(rest, values);
                    __builtin_memcpy(out + d, rest, (call_.head_dim - d) * sizeof(BFloat16));
                }
            }
        }
    }

    struct Keys {
        const BFloat16* rows;
        int64_t stride;  // bytes
    };

    const Call& call_;
    const Seeing seeing_;
    const int num_queries_;
    const int num_tiles_;  // of queries
    const int padded_dim_;
    const int num_columns_;
    const int tiled_dim_;
    const bool keys_in_place_;
    const TileScratch scratch_;
    const TileState run_;
    const TileState result_;
    const TileSoftmax softmax_;
    const Walk<S, TileAttend> walk_;
    TileRows<BFloat16> widened_;  // of codes
    Keys keys_[kTilesOfKeys];
    Tiles tiles_;
};

template <class S>
void attend(const Call& call, const WorkItem& item, void* scratch, float* states) {
    TileAttend<S>(call, item, scratch).run(states);
}

void fold_states(const Call& call, const WorkItem& item, void* scratch, const float* states) {
    TileAttend<BFloat16>(call, item, scratch).run_folded(states);
}

}  // namespace

const TileKernels PDSERVE_OF_THIS_BUILD(TileKernels) = {
    {attend<BFloat16>, fold_states}, {attend<Int8>, fold_states}, {attend<Fp8>, fold_states}};

}  // namespace pdserve::attention
