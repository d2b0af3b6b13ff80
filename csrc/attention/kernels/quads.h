// Scores from pairs of bfloat16, with AVX512-BF16's dot product, without transposing the keys.
//
// A quad is 4 pairs: 8 consecutive elements of a key, 128 bits. The quads of 16 keys are loaded
// into 4 vectors: vector r holds, in its 128-bit lane L, the quad of key 4 L + r. So loads alone
// place them. The query's quad is broadcast to all lanes. The product adds to 4 partial scores of
// each key, which are summed at the end, always in the same order. With few queries, keys are read
// directly from the pool; with many, they are first packed, quad by quad.
#pragma once

#include "scratch.h"
#include "tile.h"

namespace pdserve::attention {
namespace {

#if defined(__AVX512BF16__)

constexpr int kGroupKeys = 16;
constexpr int kQuadElements = 8;

struct Quad {
    PairLanes of_keys[4];
};

// Reads the quads of 16 rows at equal distances. The hardware prefetcher does not recognise this
// access pattern, so the lines of the next group are prefetched into the L1 cache, a few with each
// quad.
class KeyRows {
public:
    KeyRows(const BFloat16* first, int64_t stride, const void* next_group)
        : stride_(stride), next_(static_cast<const char*>(next_group)) {
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; ++lane) starts_[lane] = first + 4 * lane * stride;
    }

    PDSERVE_INLINE Quad next_quad() {
        Quad quad;
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const auto of_row = [&](int lane) {
                return _mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(starts_[lane] + r * stride_));
            };
            // Masked broadcasts compile to plain loads; inserts would need additional shuffles.
            __m512i lanes = _mm512_castsi128_si512(of_row(0));
            lanes = _mm512_mask_broadcast_i32x4(lanes, 0x00f0, of_row(1));
            lanes = _mm512_mask_broadcast_i32x4(lanes, 0x0f00, of_row(2));
            lanes = _mm512_mask_broadcast_i32x4(lanes, 0xf000, of_row(3));
            quad.of_keys[r] = (PairLanes)lanes;
        }
#pragma GCC unroll 4
        for (const BFloat16*& start : starts_) start += kQuadElements;
#pragma GCC unroll 4
        for (int i = 0; i < kQuadLines; ++i) __builtin_prefetch(next_ + i * kLineBytes, 0, 3);
        next_ += kQuadLines * kLineBytes;
        return quad;
    }

private:
    static constexpr int kQuadLines = kGroupKeys * kQuadElements * 2 / kLineBytes;

    const BFloat16* starts_[4];
    const int64_t stride_;
    const char* next_;
};

// Reads the packed quads of 16 keys.
class PackedKeys {
public:
    explicit PackedKeys(const uint32_t* start) : at_(start) {}

    PDSERVE_INLINE Quad next_quad() {
        Quad quad;
        __builtin_memcpy(&quad, at_, sizeof(quad));
        at_ += sizeof(quad) / sizeof(*at_);
        return quad;
    }

private:
    const uint32_t* at_;
};

// Lane k: the sum of the 4 partial scores of key k.
PDSERVE_INLINE FloatLanes sum_of_partials(const FloatLanes (&partials)[4]) {
    const auto add_halves = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    };
    const auto low = (__m512d)add_halves((__m512)partials[0], (__m512)partials[1]);
    const auto high = (__m512d)add_halves((__m512)partials[2], (__m512)partials[3]);
    return (FloatLanes)_mm512_add_ps(
        (__m512)_mm512_unpacklo_pd(low, high), (__m512)_mm512_unpackhi_pd(low, high));
}

// scores[q * kTileKeys + k] = dot product of queries[q] and key k, for Q queries and 16 keys.
template <int Q, class Keys>
PDSERVE_INLINE void score_16_keys(const uint32_t* queries, int64_t query_stride, Keys keys,
    int num_quads, Prefetcher& next, float* scores) {
    FloatLanes partials[Q][4] = {};
#pragma GCC unroll 2
    for (int i = 0; i < num_quads; ++i, queries += kQuadElements / 2) {
        const Quad quad = keys.next_quad();
        next.ask<kLinesAtQuad>();
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const auto query = (PairLanes)_mm512_broadcast_i32x4(_mm_loadu_si128(
                reinterpret_cast<const __m128i*>(queries + q * query_stride)));
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                partials[q][r] = multiply_add(partials[q][r], query, quad.of_keys[r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) store(scores + q * kTileKeys, sum_of_partials(partials[q]));
}

// The keys of the current tile.
template <class S>
class QuadKeys {
public:
    QuadKeys(const Call& call, const Scratch& scratch)
        : head_dim_(call.head_dim),
          padded_dim_(padded_head_dim(call.head_dim)),
          is_in_place_(!kIsCoded<S> && padded_dim_ == head_dim_
              && call.block_size % kGroupKeys == 0),
          rows_(reinterpret_cast<BFloat16*>(scratch.key_rows)),
          packed_(reinterpret_cast<uint32_t*>(scratch.packed_keys)) {}

    void bring(const TileRows<S>& tile, int num_queries, const TileRows<S>& next) {
        is_packed_ = num_queries > kMostQueriesInPlace;
        for (int k = 0; k < tile.last; k += kGroupKeys) {
            const S* const* keys = tile.keys + k;
            Group& group = groups_[k / kGroupKeys];
            group = {copied(keys, k), padded_dim_, nullptr};
            if constexpr (!kIsCoded<S>) {
                if (is_in_place_) group = {keys[0], keys[1] - keys[0], nullptr};
            }
            group.next = k + kGroupKeys < tile.last ? keys[kGroupKeys] : next.keys[0];
            if (is_packed_) pack(group.rows(), packed_at(k));
        }
    }

    // For keys [0, num_keys) of the tile: whole groups of 16.
    template <int Q>
    PDSERVE_INLINE void score(
        const uint32_t* queries, int num_keys, Prefetcher& next, float* scores) const {
        const int num_quads = padded_dim_ / kQuadElements;
        for (int k = 0; k < num_keys; k += kGroupKeys) {
            if (is_packed_) {
                score_16_keys<Q>(
                    queries, padded_dim_, PackedKeys(packed_at(k)), num_quads, next, scores + k);
            } else {
                score_16_keys<Q>(queries, padded_dim_, groups_[k / kGroupKeys].rows(), num_quads,
                    next, scores + k);
            }
        }
    }

private:
    struct Group {
        const BFloat16* first;
        int64_t stride;
        const void* next;

        KeyRows rows() const { return {first, stride, next}; }
    };

    uint32_t* packed_at(int k) const { return packed_ + k * padded_dim_ / 2; }

    // For rows that are not adjacent in memory, or not a multiple of quads long; and of codes.
    const BFloat16* copied(const S* const* keys, int k) const {
        BFloat16* rows = rows_ + k * padded_dim_;
        if (is_in_place_) return rows;
        for (int i = 0; i < kGroupKeys; ++i) {
            BFloat16* row = rows + i * padded_dim_;
            copy_row(keys[i], head_dim_, row);
            for (int d = head_dim_; d < padded_dim_; ++d) row[d] = {0};
        }
        return rows;
    }

    void pack(KeyRows rows, uint32_t* target) const {
        for (int d = 0; d < padded_dim_; d += kQuadElements, target += sizeof(Quad) / 4) {
            const Quad quad = rows.next_quad();
            __builtin_memcpy(target, &quad, sizeof(quad));
        }
    }

    const int head_dim_;
    const int padded_dim_;
    const bool is_in_place_;
    BFloat16* const rows_;
    uint32_t* const packed_;
    Group groups_[kTileKeys / kGroupKeys];
    bool is_packed_ = false;
};

#endif

}  // namespace
}  // namespace pdserve::attention
