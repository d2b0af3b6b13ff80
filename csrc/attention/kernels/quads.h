// Scores from pairs of bfloat16, with AVX512-BF16's dot product, without transposing the keys.
//
// A quad is 4 pairs: 8 consecutive elements of a key, 128 bits. The quads of 16 keys are loaded
// into 4 vectors: vector r holds, in its 128-bit lane L, the quad of key 4 L + r. So loads alone
// place them. The query's quad is broadcast to all lanes. The product adds to 4 partial scores of
// each key, which are summed at the end, always in the same order. With few queries, keys are read
// directly from the pool; with many, they are first packed, quad by quad.
#pragma once

#include <type_traits>

#include "decode_codes.h"
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
constexpr int kQuadWords = sizeof(Quad) / sizeof(uint32_t);

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

    static constexpr int kQuads = 1;  // at a time

    PDSERVE_INLINE void next(Quad (&quads)[kQuads]) {
        Quad& quad = quads[0];
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
    }

private:
    static constexpr int kQuadLines = kGroupKeys * kQuadElements * 2 / kLineBytes;

    const BFloat16* starts_[4];
    const int64_t stride_;
    const char* next_;
};

#if defined(PDSERVE_HAS_CODE_TABLES)

// The same of rows of float8: two quads of each key at a time, as 128 bits hold 16 codes.
class CodedKeyRows {
public:
    static constexpr int kQuads = 2;

    CodedKeyRows(const Fp8* first, int64_t stride, const void* next_group)
        : stride_(stride), next_(static_cast<const char*>(next_group)) {
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; ++lane) starts_[lane] = first + 4 * lane * stride;
    }

    PDSERVE_INLINE void next(Quad (&quads)[kQuads]) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const auto of_row = [&](int lane) {
                return _mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(starts_[lane] + r * stride_));
            };
            __m512i codes = _mm512_castsi128_si512(of_row(0));
            codes = _mm512_mask_broadcast_i32x4(codes, 0x00f0, of_row(1));
            codes = _mm512_mask_broadcast_i32x4(codes, 0x0f00, of_row(2));
            codes = _mm512_mask_broadcast_i32x4(codes, 0xf000, of_row(3));
            __m512i halves[2];
            decode_to_halves(codes, halves);
            quads[0].of_keys[r] = (PairLanes)halves[0];
            quads[1].of_keys[r] = (PairLanes)halves[1];
        }
#pragma GCC unroll 4
        for (const Fp8*& start : starts_) start += kQuads * kQuadElements;
#pragma GCC unroll 4
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(next_ + i * kLineBytes, 0, 3);
        next_ += kLines * kLineBytes;
    }

private:
    static constexpr int kLines = kGroupKeys * kQuads * kQuadElements / kLineBytes;

    const Fp8* starts_[4];
    const int64_t stride_;
    const char* next_;
};

template <class S>
using RowsInPlace = std::conditional_t<kIsCoded<S>, CodedKeyRows, KeyRows>;
template <class S>
constexpr bool kCanBeInPlace = true;
#else
template <class S>
using RowsInPlace = KeyRows;
template <class S>
constexpr bool kCanBeInPlace = !kIsCoded<S>;
#endif

// Reads the packed quads of 16 keys.
class PackedKeys {
public:
    explicit PackedKeys(const uint32_t* start) : at_(start) {}

    static constexpr int kQuads = 1;

    PDSERVE_INLINE void next(Quad (&quads)[kQuads]) {
        __builtin_memcpy(quads, at_, sizeof(quads));
        at_ += kQuads * kQuadWords;
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
    for (int i = 0; i < num_quads; i += Keys::kQuads) {
        Quad quads[Keys::kQuads];
        keys.next(quads);
        next.ask<kLinesAtQuad>();
#pragma GCC unroll 2
        for (const Quad& quad : quads) {
#pragma GCC unroll 8
            for (int q = 0; q < Q; ++q) {
                const auto query = (PairLanes)_mm512_broadcast_i32x4(_mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(queries + q * query_stride)));
#pragma GCC unroll 4
                for (int r = 0; r < 4; ++r) {
                    partials[q][r] = multiply_add(partials[q][r], query, quad.of_keys[r]);
                }
            }
            queries += kQuadElements / 2;
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) store(scores + q * kTileKeys, sum_of_partials(partials[q]));
}

// The keys of the current tile. Rows that are not adjacent in memory, or not a multiple of quads
// long, are copied first, as bfloat16.
template <class S>
class QuadKeys {
public:
    QuadKeys(const Call& call, const Scratch& scratch)
        : head_dim_(call.head_dim),
          padded_dim_(padded_head_dim(call.head_dim)),
          is_in_place_(kCanBeInPlace<S> && padded_dim_ == head_dim_
              && call.block_size % kGroupKeys == 0),
          copies_(reinterpret_cast<BFloat16*>(scratch.key_rows)),
          packed_(reinterpret_cast<uint32_t*>(scratch.packed_keys)) {}

    void bring(const TileRows<S>& tile, int num_queries, const TileRows<S>& next) {
        is_packed_ = num_queries > kMostQueriesInPlace;
        for (int k = 0; k < tile.last; k += kGroupKeys) {
            const S* const* keys = tile.keys + k;
            groups_[k / kGroupKeys] = {keys[0], keys[1] - keys[0],
                k + kGroupKeys < tile.last ? keys[kGroupKeys] : next.keys[0]};
            if (!is_in_place_) copy(keys, k);
            if (is_packed_) {
                of_group(k, [&](const auto& rows) { pack(rows, packed_at(k)); });
            }
        }
    }

    // For keys [0, num_keys) of the tile: whole groups of 16.
    template <int Q>
    PDSERVE_INLINE void score(
        const uint32_t* queries, int num_keys, Prefetcher& next, float* scores) const {
        const int num_quads = padded_dim_ / kQuadElements;
        for (int k = 0; k < num_keys; k += kGroupKeys) {
            const auto score_rows = [&](const auto& rows) {
                score_16_keys<Q>(queries, padded_dim_, rows, num_quads, next, scores + k);
            };
            if (is_packed_) {
                score_rows(PackedKeys(packed_at(k)));
            } else {
                of_group(k, score_rows);
            }
        }
    }

private:
    struct Group {
        const S* first;
        int64_t stride;
        const S* next;
    };

    // Calls body with what reads the 16 keys from k on.
    template <class Body>
    PDSERVE_INLINE void of_group(int k, const Body& body) const {
        const Group& group = groups_[k / kGroupKeys];
        if constexpr (kCanBeInPlace<S>) {
            if (is_in_place_) return body(RowsInPlace<S>(group.first, group.stride, group.next));
        }
        body(KeyRows(copies_ + k * padded_dim_, padded_dim_, group.next));
    }

    uint32_t* packed_at(int k) const { return packed_ + k * padded_dim_ / 2; }

    void copy(const S* const* keys, int k) const {
        BFloat16* row = copies_ + k * padded_dim_;
        for (int i = 0; i < kGroupKeys; ++i, row += padded_dim_) {
            copy_row(keys[i], head_dim_, row);
            for (int d = head_dim_; d < padded_dim_; ++d) row[d] = {0};
        }
    }

    template <class Rows>
    void pack(Rows rows, uint32_t* target) const {
        Quad quads[Rows::kQuads];
        for (int d = 0; d < padded_dim_; d += Rows::kQuads * kQuadElements) {
            rows.next(quads);
            __builtin_memcpy(target, quads, sizeof(quads));
            target += Rows::kQuads * kQuadWords;
        }
    }

    const int head_dim_;
    const int padded_dim_;
    const bool is_in_place_;
    BFloat16* const copies_;
    uint32_t* const packed_;
    Group groups_[kTileKeys / kGroupKeys];
    bool is_packed_ = false;
};

#endif

}  // namespace
}  // namespace pdserve::attention
