// Paged attention of bfloat16 through tiles (../amx.h). As in attend.h, for prefill chunks and
// decode steps alike, in tiles of 64 keys; but for 16 queries at a time, one in each lane.
//
// Scores are keys x queries, so that keys are read as they lie in the pool, and that the softmax
// needs nothing across lanes. Its weights are transposed for weights x values. What a query gets
// does not depend on the queries in the other lanes: to a query that does not see a tile, the tile
// adds nothing, exactly.

#include "../amx.h"
#include "../build_name.h"
#include "amx_scratch.h"
#include "kernel.h"
#include "pack.h"
#include "softmax.h"
#include "walk.h"

namespace pdserve::attention {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr int kTilesOfKeys = kTileKeys / 16;
constexpr int kPairs = kTileKeys / 2;
constexpr int kLinesAtPair = 8;    // that are prefetched with each pair of weights
constexpr int kLinesAtScore = 16;  // and with each tile of keys

static_assert(kLanes == kTileQueries);

PDSERVE_INLINE IntLanes splat_int(int value) { return value - IntLanes{}; }

PDSERVE_INLINE bool any(IntLanes lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
    for (int i = 0; i < kLanes; ++i) {
        if (lanes[i] != 0) return true;
    }
    return false;
#endif
}

// The weights of two keys as pairs of bfloat16.
PDSERVE_INLINE PairLanes pairs_of(FloatLanes low, FloatLanes high) {
#if defined(__AVX512BF16__)
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
        8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (PairLanes)_mm512_permutexvar_epi16(order, halves);
#else
    BFloat16 lows[kLanes], highs[kLanes];
    store(lows, low);
    store(highs, high);
    PairLanes pairs;
    for (int i = 0; i < kLanes; ++i) pairs[i] = pair_of(lows[i], highs[i]);
    return pairs;
#endif
}

// total + low + high
PDSERVE_INLINE FloatLanes add_pairs(FloatLanes total, PairLanes pairs) {
#if defined(__AVX512BF16__)
    return multiply_add(total, pairs, splat(uint32_t{0x3f803f80}));
#else
    return total + (FloatLanes)(pairs << 16) + (FloatLanes)(pairs & 0xffff0000u);
#endif
}

PDSERVE_INLINE bool is_finite(PairLanes pairs) {
    const PairLanes low = pairs & 0x7f80u, high = pairs & 0x7f800000u;
    return !any((IntLanes)(low == splat(uint32_t{0x7f80}))
        | (IntLanes)(high == splat(uint32_t{0x7f800000})));
}

// Keys of the tile, counted from its start.
struct SeenKeys {
    int tile_start;
    int window;  // 0: none

    // Lanes of queries that see the key: all bits set.
    PDSERVE_INLINE IntLanes by(IntLanes positions, int key) const {
        const IntLanes at = splat_int(tile_start + key);
        IntLanes seen = positions >= at;
        if (window > 0) seen &= positions - splat_int(window) < at;
        return seen;
    }
};

class TileAttend {
public:
    TileAttend(const Call& call, const WorkItem& item, void* buffer)
        : call_(call),
          seeing_(call, item),
          num_queries_(item.num_rows * seeing_.group_size),
          num_tiles_(whole_tiles_of_queries(num_queries_)),
          padded_dim_(padded_head_dim(call.head_dim)),
          tiled_dim_(tiled_head_dim(call.head_dim)),
          keys_in_place_(tiled_dim_ == call.head_dim && call.block_size % 16 == 0),
          scratch_(buffer, num_queries_, call.head_dim),
          run_(TileState::at(scratch_.run, num_queries_, call.head_dim)),
          result_(TileState::at(scratch_.result, num_queries_, call.head_dim)),
          walk_(call, item, seeing_, reinterpret_cast<const BFloat16*>(scratch_.zero_row),
              shared_state_size(num_queries_, call.head_dim)) {
        __builtin_memset(scratch_.zero_row, 0, tiled_dim_ * sizeof(float));
        for (int q = 0; q < num_tiles_ * kTileQueries; ++q) {
            scratch_.positions[q] = seeing_.position(q < num_queries_ ? q : num_queries_ - 1);
        }
    }

    void run(float* states) { walk_.run(*this, states); }

    void run_folded(const float* states) {
        reset(result_);
        walk_.run_folded(*this, states);
    }

private:
    friend class Walk<BFloat16, TileAttend>;

    void begin_head(int head) {
        reset(result_);
        auto* tiles = reinterpret_cast<uint32_t*>(scratch_.query_tiles);
        __builtin_memset(tiles, 0, sizeof(float) * num_tiles_ * kTileQueries * tiled_dim_ / 2);
        for (int q = 0; q < num_queries_; ++q) {
            const BFloat16* source = static_cast<const BFloat16*>(call_.query) + query_offset(head, q);
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
        __builtin_memset(state.sums, 0, queries * padded_dim_ * sizeof(float));
        __builtin_memset(state.totals, 0, queries * sizeof(float));
        for (size_t q = 0; q < queries; ++q) state.maxima[q] = kMinusInfinity;
    }

    void add_tile(int tile_start, const TileRows<BFloat16>& tile, TileRows<BFloat16>& next) {
        const Range queries = seeing_.queries(tile_start, tile_start + kTileKeys);
        const int last = (queries.last + kTileQueries - 1) / kTileQueries;
        const int first = queries.first / kTileQueries;
        next.prefetcher.set_pace(last - first);
        bring_keys(tile);
        bring_values(tile);
        for (int t = first; t < last; ++t) {
            const int last_seen = scratch_.positions[t * kTileQueries + kTileQueries - 1] + 1;
            const int num_keys = last_seen - tile_start < tile.last ? last_seen - tile_start : tile.last;
            score(t, num_keys, next.prefetcher);
            weigh(t, tile, tile_start, num_keys, next.prefetcher);
            decay_sums(t);
            if (values_are_finite_ || sees_all(t, tile, tile_start, num_keys)) {
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
        pack_values<BFloat16>(tile, call_.head_dim, padded_dim_, values);
        const int first = tile.first / 2, end = (tile.last + 1) / 2;
        __builtin_memset(values, 0, sizeof(float) * first * padded_dim_);
        __builtin_memset(values + end * padded_dim_, 0, sizeof(float) * (kPairs - end) * padded_dim_);
        values_are_finite_ = true;
        for (int i = first * padded_dim_; i < end * padded_dim_; i += kLanes) {
            values_are_finite_ = values_are_finite_ && is_finite(load(values + i));
        }
    }

    // scores[k][q] = key k x query q, for whole tiles of keys.
    void score(int tile, int num_keys, Prefetcher& next) {
        const auto* queries = reinterpret_cast<const char*>(scratch_.query_tiles)
            + static_cast<int64_t>(tile) * tiled_dim_ / 32 * kTileBytes;
        tiles_.zero<0>();
        tiles_.zero<1>();
        tiles_.zero<2>();
        tiles_.zero<3>();
        for (int d = 0; d < tiled_dim_; d += 32, queries += kTileBytes) {
            tiles_.load<4>(queries, kTileRowBytes);
            score_16_keys<0>(d, num_keys, next);
            score_16_keys<1>(d, num_keys, next);
            score_16_keys<2>(d, num_keys, next);
            score_16_keys<3>(d, num_keys, next);
        }
        constexpr int kStride = kTileQueries * sizeof(float);
        tiles_.store<0>(scratch_.scores, kStride);
        if (num_keys > 16) tiles_.store<1>(scratch_.scores + 16 * kTileQueries, kStride);
        if (num_keys > 32) tiles_.store<2>(scratch_.scores + 32 * kTileQueries, kStride);
        if (num_keys > 48) tiles_.store<3>(scratch_.scores + 48 * kTileQueries, kStride);
    }

    template <int kTile>
    PDSERVE_INLINE void score_16_keys(int first_dim, int num_keys, Prefetcher& next) {
        if (kTile * 16 >= num_keys) return;
        next.ask<kLinesAtScore>();
        constexpr int kKeys = 5 + kTile % 3;
        tiles_.load<kKeys>(keys_[kTile].rows + first_dim, keys_[kTile].stride);
        tiles_.multiply_bfloat16<kTile, kKeys, 4>();
    }

    // Do all queries of the tile see the keys [first, num_keys)?
    bool sees_all(int tile, const TileRows<BFloat16>& rows, int tile_start, int num_keys) const {
        const int32_t* positions = scratch_.positions + tile * kTileQueries;
        const int first_position = positions[0], last_position = positions[kTileQueries - 1];
        const bool begins_before =
            call_.sliding_window == 0 || last_position - call_.sliding_window < tile_start + rows.first;
        return begins_before && first_position >= tile_start + num_keys - 1;
    }

    // Turns scores into weights: the online softmax of 16 queries.
    void weigh(int tile, const TileRows<BFloat16>& rows, int tile_start, int num_keys,
        Prefetcher& next) {
        const bool all_seen = rows.first == 0 && sees_all(tile, rows, tile_start, num_keys);
        float* scores = scratch_.scores;
        if (!all_seen) mask_scores(tile, tile_start, num_keys);
        float* maxima = run_.maxima + tile * kTileQueries;
        float* totals = run_.totals + tile * kTileQueries;
        FloatLanes largest = load(scores);
        for (int k = 1; k < num_keys; ++k) {
            largest = max_of(largest, load(scores + k * kTileQueries));
        }
        const FloatLanes scale = splat(call_.scale * kLog2E);
        const FloatLanes before = load(maxima);
        const FloatLanes maximum = max_of(before, largest * scale);
        store(maxima, maximum);
        // Where nothing has been seen yet, everything is minus infinity, and all weights are 0.
        const FloatLanes base = maximum == splat(kMinusInfinity) ? FloatLanes{} : maximum;
        const FloatLanes decay = exp2_of_nonpositive(before - base);
        store(scratch_.decays, decay);
        decays_ = any((IntLanes)(decay != splat(1.0f)));
        FloatLanes total = load(totals) * decay;
        auto* pairs = reinterpret_cast<uint32_t*>(scratch_.pairs);
        const int end = (num_keys + 31) / 32 * 32;
        for (int k = 0; k < end; k += 2) {
            next.ask<kLinesAtPair>();
            const PairLanes pair = pairs_of(
                weight(k, num_keys, scale, base), weight(k + 1, num_keys, scale, base));
            total = add_pairs(total, pair);
            store(pairs + k / 2 * kTileQueries, pair);
        }
        store(totals, total);
        transpose_weights(end);
    }

    PDSERVE_INLINE FloatLanes weight(int k, int num_keys, FloatLanes scale, FloatLanes base) const {
        if (k >= num_keys) return FloatLanes{};
        return exp2_for_pairs(multiply_add(-base, load(scratch_.scores + k * kTileQueries), scale));
    }

    void mask_scores(int tile, int tile_start, int num_keys) const {
        const auto positions = load_as<IntLanes>(scratch_.positions + tile * kTileQueries);
        const SeenKeys seen{tile_start, call_.sliding_window};
        for (int k = 0; k < num_keys; ++k) {
            float* score = scratch_.scores + k * kTileQueries;
            store(score, seen.by(positions, k) ? load(score) : splat(kMinusInfinity));
        }
    }

    // [pairs of keys][queries] -> [queries][keys], for `num_keys` keys.
    void transpose_weights(int num_keys) const {
        for (int k = 0; k < num_keys; k += 32) {
            const char* rows[kTransposeSize];
            for (int i = 0; i < kTransposeSize; ++i) {
                rows[i] = reinterpret_cast<const char*>(
                    scratch_.pairs + (k / 2 + i) * kTileQueries);
            }
            auto* weights = reinterpret_cast<uint32_t*>(scratch_.weights) + k / 2;
            transpose16(rows, weights, kPairs, [] {});
        }
    }

    float* sums_of(int tile) const {
        return run_.sums + static_cast<int64_t>(tile) * kTileQueries * padded_dim_;
    }

    void decay_sums(int tile) const {
        if (!decays_) return;
        float* sums = sums_of(tile);
        for (int q = 0; q < kTileQueries; ++q, sums += padded_dim_) {
            const FloatLanes decay = splat(scratch_.decays[q]);
            for (int d = 0; d < padded_dim_; d += kLanes) store(sums + d, load(sums + d) * decay);
        }
    }

    // sums[q] += the sum over keys, ascending, of weights[q][k] values[k].
    void add_values(const float* values, int num_keys, float* sums) {
        int d = 0;
        for (; d + 64 <= padded_dim_; d += 64) add_columns<4>(values + d, num_keys, sums + d);
        for (; d < padded_dim_; d += 16) add_columns<1>(values + d, num_keys, sums + d);
    }

    template <int kColumns>
    PDSERVE_INLINE void add_columns(const float* values, int num_keys, float* sums) {
        const int64_t stride = padded_dim_ * sizeof(float);
        load_column<0, kColumns>(sums, stride);
        load_column<1, kColumns>(sums, stride);
        load_column<2, kColumns>(sums, stride);
        load_column<3, kColumns>(sums, stride);
        for (int k = 0; k < num_keys; k += 32, values += 16 * padded_dim_) {
            tiles_.load<4>(scratch_.weights + k / 2, kPairs * sizeof(uint32_t));
            add_column<0, kColumns>(values, stride);
            add_column<1, kColumns>(values, stride);
            add_column<2, kColumns>(values, stride);
            add_column<3, kColumns>(values, stride);
        }
        store_column<0, kColumns>(sums, stride);
        store_column<1, kColumns>(sums, stride);
        store_column<2, kColumns>(sums, stride);
        store_column<3, kColumns>(sums, stride);
    }

    template <int kColumn, int kColumns>
    PDSERVE_INLINE void load_column(const float* sums, int64_t stride) {
        if constexpr (kColumn < kColumns) tiles_.load<kColumn>(sums + kColumn * 16, stride);
    }

    template <int kColumn, int kColumns>
    PDSERVE_INLINE void add_column(const float* values, int64_t stride) {
        if constexpr (kColumn < kColumns) {
            constexpr int kValues = 5 + kColumn % 3;
            tiles_.load<kValues>(values + kColumn * 16, stride);
            tiles_.multiply_bfloat16<kColumn, 4, kValues>();
        }
    }

    template <int kColumn, int kColumns>
    PDSERVE_INLINE void store_column(float* sums, int64_t stride) {
        if constexpr (kColumn < kColumns) tiles_.store<kColumn>(sums + kColumn * 16, stride);
    }

    // Where a value is not finite, weight 0 is not enough for those who do not see it: 0 x NaN is
    // NaN. So position by position, with zeros for the values that it does not see.
    void add_seen_values(int tile, int tile_start, int num_keys) {
        const int32_t* positions = scratch_.positions + tile * kTileQueries;
        const size_t row_bytes = padded_dim_ * sizeof(float);
        float* sums = sums_of(tile);
        for (int q = 0; q < kTileQueries;) {
            const int position = positions[q];
            keep_seen_values(position, tile_start, num_keys);
            __builtin_memcpy(scratch_.tile_sums, sums, kTileQueries * row_bytes);
            add_values(scratch_.seen_values, num_keys, scratch_.tile_sums);
            for (; q < kTileQueries && positions[q] == position; ++q) {
                __builtin_memcpy(
                    sums + q * padded_dim_, scratch_.tile_sums + q * padded_dim_, row_bytes);
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
            for (int d = 0; d < padded_dim_; ++d) {
                seen[pair * padded_dim_ + d] = values[pair * padded_dim_ + d] & kept;
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
        result_.totals[q] =
            multiply_add(splat(result_.totals[q]) * decay, splat(run.totals[q]), weight)[0];
        const int64_t first = static_cast<int64_t>(q) * padded_dim_;
        const float* from = run.sums + first;
        float* to = result_.sums + first;
        for (int d = 0; d < padded_dim_; d += kLanes) {
            store(to + d, multiply_add(load(to + d) * decay, load(from + d), weight));
        }
    }

    void write_out(int kv_head) const {
        for (int q = 0; q < num_queries_; ++q) {
            const FloatLanes reciprocal = splat(1.0f / result_.totals[q]);
            const int64_t row = seeing_.first_row + q / seeing_.group_size;
            const int64_t head = kv_head * seeing_.group_size + q % seeing_.group_size;
            const float* sums = result_.sums + static_cast<int64_t>(q) * padded_dim_;
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
    const int tiled_dim_;
    const bool keys_in_place_;
    const TileScratch scratch_;
    const TileState run_;
    const TileState result_;
    const Walk<BFloat16, TileAttend> walk_;
    Keys keys_[kTilesOfKeys];
    bool values_are_finite_ = true;
    bool decays_ = false;  // an earlier sum of the current tile of queries
    Tiles tiles_;
};

void attend(const Call& call, const WorkItem& item, void* scratch, float* states) {
    TileAttend(call, item, scratch).run(states);
}

void fold_states(const Call& call, const WorkItem& item, void* scratch, const float* states) {
    TileAttend(call, item, scratch).run_folded(states);
}

}  // namespace

const KernelsOfType PDSERVE_OF_THIS_BUILD(TileKernels) = {attend, fold_states};

}  // namespace pdserve::attention
