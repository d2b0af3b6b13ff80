// Paged attention for one work item. The same kernel serves prefill chunks and decode steps.
// query [num_tokens, num_heads, head_dim], KV pool as in ../layer.h, out like query.
//
// FlashAttention (Dao et al.) over paged KV (vLLM), in tiles of 64 keys at aligned positions. For
// each tile:
//   gather    look up pointers to its K and V rows in the block table
//   bring     put the keys into the layout for scoring: transposed_keys.h, or quads.h
// then for a few queries at a time:
//   score     multiply queries by keys, and keep scores within a cap if there is one
//   weigh     apply the mask, then one step of the online softmax, in float32
//   add       add weights x values to the running sums
// Meanwhile the next tile is prefetched. A query is a pair (row, query head of a KV head's group),
// so each K and V row is read once for the whole group (grouped-query attention).
//
// A pool of codes (stored_rows.h) is read the same way: codes become numbers as they are brought or
// added, or are multiplied as they are (integer_keys.h). The scale of a key is a factor on its
// scores, that of a value on its weights.
//
// The launchers have checked all arguments.
#pragma once

#include <type_traits>

#include "integer_values.h"
#include "products.h"
#include "quads.h"
#include "seeing.h"
#include "softmax.h"
#include "transposed_keys.h"
#include "walk.h"
#include "../../isa/tanh.h"

namespace pdserve::attention {
namespace {

// The layout in which keys, stored as S, are scored for queries of type T.
template <class T, class S>
struct KeyForm {
    using type = TransposedKeys<T, S>;
};
#if defined(__AVX512BF16__)
template <class S>
struct KeyForm<BFloat16, S> {
    using type = QuadKeys<S>;
};
#endif

// Whether codes are multiplied as integers, and how values are read then.
template <class T, class S>
constexpr bool kByIntegers = false;
struct NoValues {
    NoValues(const Call&, const Scratch&) {}
};
template <class T, class S>
struct ValueForm {
    using type = NoValues;
};
#if defined(PDSERVE_HAS_INTEGER_ROWS)
template <>
constexpr bool kByIntegers<BFloat16, Int8> = true;
template <>
struct KeyForm<BFloat16, Int8> {
    using type = IntegerKeys;
};
template <>
struct ValueForm<BFloat16, Int8> {
    using type = IntegerValues;
};
#endif

// Queries are of type T, and rows of the pool of S.
template <class T, class S>
class Attend {
    using U = typename Unit<T>::type;
    static constexpr bool kIsPair = Unit<T>::is_pair;
    static constexpr int kMostInPlace = kIsCoded<S> ? kMaxQueries : kMostQueriesInPlace;
    static constexpr int kPlaceLanes = kIsPair && !kIsCoded<S> ? 2 * kLanes : kLanes;

public:
    Attend(const Call& call, const WorkItem& item, void* buffer)
        : call_(call),
          seeing_(call, item),
          num_queries_(item.num_rows * seeing_.group_size),
          padded_dim_(padded_head_dim(call.head_dim)),
          scratch_(buffer, num_queries_, call.head_dim),
          keys_(call, scratch_),
          values_(call, scratch_),
          run_{},
          result_(state_at(scratch_.result, num_queries_, call.head_dim)),
          walk_(call, item, seeing_, reinterpret_cast<const S*>(scratch_.zero_row),
              shared_state_size(num_queries_, call.head_dim)) {
        __builtin_memset(scratch_.zero_row, 0, padded_dim_ * sizeof(float));
    }

    void run(float* states) { walk_.run(*this, states); }

    void run_folded(const float* states) {
        begin_result(walk_.first_head());
        walk_.run_folded(*this, states);
    }

private:
    friend class Walk<S, Attend>;

    // With a sink, the softmax begins with its score, before all runs.
    void begin_result(int head) {
        reset(result_, num_queries_, padded_dim_);
        if (call_.sinks == nullptr) return;
        for (int q = 0; q < num_queries_; ++q) {
            result_.maxima[q] = sink_score(call_, seeing_, head, q);
            result_.totals[q * kSumLanes] = 1.0f;
        }
    }

    void begin_head(int head) {
        begin_result(head);
        for (int q = 0; q < num_queries_; ++q) {
            const T* source = static_cast<const T*>(call_.query) + query_offset(head, q);
            U* target = queries() + static_cast<int64_t>(q) * padded_dim_;
            if constexpr (kByIntegers<T, S>) {
                quantise_query(source, call_.head_dim, padded_dim_, target);
            } else if constexpr (kIsPair) {
                __builtin_memset(target, 0, padded_dim_ / 2 * sizeof(U));
                __builtin_memcpy(target, source, call_.head_dim * sizeof(T));
            } else {
                int d = 0;
                for (; d + kLanes <= call_.head_dim; d += kLanes) {
                    store(target + d, load(source + d));
                }
                for (; d < call_.head_dim; ++d) target[d] = to_float(source[d]);
            }
        }
    }

    int64_t query_offset(int kv_head, int q) const {
        const int64_t row = seeing_.first_row + q / seeing_.group_size;
        const int64_t head = kv_head * seeing_.group_size + q % seeing_.group_size;
        return row * call_.query_row_stride + head * call_.query_head_stride;
    }

    void begin_run(float* state) {
        run_ = state_at(state == nullptr ? scratch_.run : state, num_queries_, call_.head_dim);
        reset(run_, num_queries_, padded_dim_);
    }

    void end_run(float* state, int run) {
        if (state == nullptr) fold(run_, run);
    }

    void add_tile(int tile_start, const TileRows<S>& tile, TileRows<S>& next) {
        if constexpr (kIsCoded<S>) read_scales(tile);
        keys_.bring(tile, num_queries_, next);
        if constexpr (kByIntegers<T, S>) {
            values_.bring(tile, num_queries_, next);
            compute(tile_start, tile, values_, next);
        } else if (num_queries_ > kMostInPlace || padded_dim_ != call_.head_dim
            || call_.head_dim % kPlaceLanes != 0) {
            pack_values(tile, call_.head_dim, padded_dim_, padded_dim_, packed_values());
            compute(tile_start, tile, PackedValues<U>{packed_values(), padded_dim_}, next);
        } else {
            compute(tile_start, tile, ValuesInPlace<S>{tile.values}, next);
        }
    }

    void read_scales(const TileRows<S>& tile) const {
        const int head_dim = call_.head_dim;
#if defined(PDSERVE_HAS_INTEGER_ROWS)
        if constexpr (kByIntegers<T, S>) {
            if (head_dim % 16 == 0 && call_.block_size % 16 == 0) {
                for (int k = 0; k < tile.last; k += 16) {
                    const S* key = tile.keys[k];
                    const int64_t stride = tile.keys[k + 1] - key;
                    const S* value = stride == 0 ? key : key + call_.value_offset;
                    store(scratch_.key_scales + k, load_scales(key, stride, head_dim));
                    store(scratch_.value_scales + k, load_scales(value, stride, head_dim));
                }
                return;
            }
        }
#endif
        for (int k = 0; k < kTileKeys; ++k) {
            scratch_.key_scales[k] = scale_of(tile.keys[k], head_dim);
            scratch_.value_scales[k] = scale_of(tile.values[k], head_dim);
        }
    }

    template <class Values>
    void compute(
        int tile_start, const TileRows<S>& tile, const Values& values, TileRows<S>& next) {
        const Range seeing = seeing_.queries(tile_start, tile_start + kTileKeys);
        next.prefetcher.set_pace(
            (seeing.last - seeing.first + kQueriesAtOnce - 1) / kQueriesAtOnce);
        for_queries(seeing.first, seeing.last, [&](int q, auto num_queries) {
            constexpr int kQueries = num_queries.value;
            // No query here sees a key from last_seen on. num_keys is rounded up to whole vectors.
            const int last_seen = seeing_.position(q + kQueries - 1) + 1 - tile_start;
            const int last = last_seen < tile.last ? last_seen : tile.last;
            const int num_keys = (last + kTransposeSize - 1) / kTransposeSize * kTransposeSize;
            keys_.template score<kQueries>(queries() + static_cast<int64_t>(q) * padded_dim_,
                num_keys, next.prefetcher, scratch_.scores);
            if constexpr (kIsCoded<S> && !kByIntegers<T, S>) apply_key_scales<kQueries>(num_keys);
            if (call_.cap > 0) {
                const SoftCap cap(call_.cap, call_.scale);
                for (int i = 0; i < kQueries; ++i) {
                    cap.apply(scratch_.scores + i * kTileKeys, num_keys);
                }
            }
            for (int i = 0; i < kQueries; ++i) {
                const Range keys = seeing_.keys(q + i, tile_start);
                mask(scratch_.scores + i * kTileKeys, keys.first, keys.last, num_keys);
            }
            weigh_and_add<kQueries>(q, tile_start, num_keys, tile, values, next.prefetcher);
        });
    }

    template <int Q, class Values>
    PDSERVE_INLINE void weigh_and_add(int q, int tile_start, int num_keys, const TileRows<S>& tile,
        const Values& values, Prefetcher& next) {
        float* const scores = scratch_.scores;
        float* const totals = run_.totals + q * kSumLanes;
        const float factor = call_.scale * kLog2E;
        if constexpr (kByIntegers<T, S>) {
            float* const sums = run_.sums + static_cast<int64_t>(q) * padded_dim_;
            weigh_integers<Q>(scores, factor, num_keys, see_alike(q, q + Q - 1, tile, tile_start),
                run_.maxima + q, totals, scratch_.decays, scratch_.factors,
                scratch_.value_scales, next);
            values.template add<Q>(scores, num_keys, next, scratch_.decays, scratch_.factors, sums);
        } else {
            weigh<Q, kIsPair, kIsCoded<S>>(scores, factor, num_keys, run_.maxima + q, totals,
                scratch_.decays, scratch_.value_scales, next);
            if (see_alike(q, q + Q - 1, tile, tile_start)) {
                add<Q>(q, 0, tile, tile_start, values, next);
            } else {
                add_by_rows(q, q + Q, tile, tile_start, values, next);
            }
        }
    }

    template <int Q>
    PDSERVE_INLINE void apply_key_scales(int num_keys) const {
        for (int k = 0; k < num_keys; k += kLanes) {
            const FloatLanes scales = load(scratch_.key_scales + k);
#pragma GCC unroll 8
            for (int q = 0; q < Q; ++q) {
                float* scores = scratch_.scores + q * kTileKeys + k;
                store(scores, load(scores) * scales);
            }
        }
    }

    // The keys of a tile that this query sees, limited to those that the item sees.
    PDSERVE_INLINE Range keys_of(int q, const TileRows<S>& tile, int tile_start) const {
        Range keys = seeing_.keys(q, tile_start);
        if (keys.first < tile.first) keys.first = tile.first;
        if (keys.last > tile.last) keys.last = tile.last;
        return keys;
    }

    PDSERVE_INLINE bool see_alike(
        int first, int last, const TileRows<S>& tile, int tile_start) const {
        const Range a = keys_of(first, tile, tile_start), b = keys_of(last, tile, tile_start);
        return a.first == b.first && a.last == b.last;
    }

    // For queries [first, last) that see different keys: row by row, each over its own keys only.
    // Giving the other keys weight 0 is not enough, since 0 x NaN is NaN.
    template <class Values>
    PDSERVE_INLINE void add_by_rows(int first, int last, const TileRows<S>& tile, int tile_start,
        const Values& values, Prefetcher& next) {
        for (int q = first; q < last;) {
            const int row_end = (q / seeing_.group_size + 1) * seeing_.group_size;
            const int end = row_end < last ? row_end : last;
            for_queries(q, end, [&](int piece, auto num_queries) {
                add<num_queries.value>(
                    piece, piece - first, tile, tile_start, values, next);
            });
            q = end;
        }
    }

    // For Q queries that see the same keys of the tile. The scores of the first query are in row
    // `row`.
    template <int Q, class Values>
    PDSERVE_INLINE void add(int q, int row, const TileRows<S>& tile, int tile_start,
        const Values& values, Prefetcher& next) {
        constexpr bool kIsInPlace = !std::is_same_v<Values, PackedValues<U>>;
        const Range keys = keys_of(q, tile, tile_start);
        const U* weights = reinterpret_cast<const U*>(scratch_.scores) + row * kTileKeys;
        float* sums = run_.sums + static_cast<int64_t>(q) * padded_dim_;
        for_columns<kIsPair ? 4 : columns_for(Q), kIsInPlace ? kPlaceLanes / kLanes : 1>(
            padded_dim_ / kLanes, [&](int column, auto num) {
                add_values<Q, num.value>(weights, values, keys, next, column * kLanes,
                    scratch_.decays + row, sums, padded_dim_);
            });
    }

    void fold(float* state, int run) {
        fold(state_at(state, num_queries_, call_.head_dim), run);
    }

    void fold(const State& state, int run) {
        const Range seeing = seeing_.queries(run * kRunKeys, (run + 1) * kRunKeys);
        for (int q = seeing.first; q < seeing.last; ++q) fold_query(state, result_, q, padded_dim_);
    }

    void write_out(int kv_head) {
        for (int q = 0; q < num_queries_; ++q) {
            float total = 0.0f;
            for (int i = 0; i < kSumLanes; ++i) total += result_.totals[q * kSumLanes + i];
            const float reciprocal = 1.0f / total;
            const int64_t row = seeing_.first_row + q / seeing_.group_size;
            const int64_t head = kv_head * seeing_.group_size + q % seeing_.group_size;
            const float* sums = result_.sums + static_cast<int64_t>(q) * padded_dim_;
            T* out = static_cast<T*>(call_.out) + (row * call_.num_heads + head) * call_.head_dim;
            int d = 0;
            for (; d + kLanes <= call_.head_dim; d += kLanes) {
                store(out + d, load(sums + d) * splat(reciprocal));
            }
            for (; d < call_.head_dim; ++d) assign(out[d], sums[d] * reciprocal);
        }
    }

    U* queries() { return reinterpret_cast<U*>(scratch_.queries); }
    U* packed_values() { return reinterpret_cast<U*>(scratch_.values); }

    const Call& call_;
    const Seeing seeing_;
    const int num_queries_;
    const int padded_dim_;
    const Scratch scratch_;
    typename KeyForm<T, S>::type keys_;
    typename ValueForm<T, S>::type values_;
    State run_;
    const State result_;
    const Walk<S, Attend> walk_;
};

template <class T, class S>
void attend(const Call& call, const WorkItem& item, void* scratch, float* states) {
    Attend<T, S>(call, item, scratch).run(states);
}

template <class T, class S>
void fold_states(const Call& call, const WorkItem& item, void* scratch, const float* states) {
    Attend<T, S>(call, item, scratch).run_folded(states);
}

template <class T, class S>
constexpr AttendKernels kernels_of_types() {
    return {attend<T, S>, fold_states<T, T>};  // what has been stored matters no more
}

}  // namespace
}  // namespace pdserve::attention
