// Sums of weights x int8 codes of values, as the pool has them, with AVX512-VNNI (integer_keys.h). In
// each tile, weights become integers of 16 bits. A key that a query does not see adds exactly 0.
#pragma once

#include "integer_keys.h"
#include "softmax.h"

namespace pdserve::attention {
namespace {

#if defined(PDSERVE_HAS_INTEGER_ROWS)

constexpr int kCodeColumns = 64;  // of a value
constexpr int kKeysAtOnce = 4;    // of which a lane has a byte each
constexpr float kLargestWeight = 65535.0f;

// The 4 weights of keys from 4 * unit on: of 16 keys, the lower bytes stand before the upper ones.
PDSERVE_INLINE IntLanes weights_at(const float* weights, int unit, int plane) {
    int32_t four;
    const auto* bytes = reinterpret_cast<const uint8_t*>(weights);
    __builtin_memcpy(&four, bytes + unit / 4 * 64 + unit % 4 * 4 + plane * 16, sizeof(four));
    return four - IntLanes{};
}

// What weights are multiplied by to become integers: the values' scales, by the largest of them.
// Returns that one.
PDSERVE_INLINE float share_scales(
    const float* scores, const float* scales, int num_keys, float* shares) {
    IntLanes largest = {};  // magnitudes have the same order as their bits, with NaN at the end
    for (int k = 0; k < num_keys; k += kLanes) {
        const FloatLanes seen = seen_scales(load(scores + k), scales + k);
        largest = (IntLanes)_mm512_max_epu32((__m512i)largest, (__m512i)seen);
        store(shares + k, seen);
    }
    const auto most = __builtin_bit_cast(float, _mm512_reduce_max_epu32((__m512i)largest));
    const float inverse = most > 0.0f ? 1.0f / most : 0.0f;
    for (int k = 0; k < num_keys; k += kLanes) {
        store(shares + k, load(shares + k) * splat(inverse) * splat(kLargestWeight));
    }
    return most;
}

// As weigh (softmax.h), but weights are 2 ** (score * scale - the tile's own maximum), times the
// value's scale by the largest one that the query sees, as integers. `factors` are what their sums
// are to be multiplied by. All queries see the same keys if they see alike.
template <int Q>
PDSERVE_INLINE void weigh_integers(float* scores, float factor, int num_keys, bool see_alike,
    float* maxima, float* totals, float* decays, float* factors, const float* value_scales,
    Prefetcher& next) {
    alignas(64) float shares[kTileKeys];
    FloatLanes largest[Q];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) largest[q] = splat(kMinusInfinity);
    scale_scores<kLinesAtCodes>(scores, factor, num_keys, largest, next);
    FloatLanes of_tile[Q], before = {}, arrived = {}, most = {};  // a query in each lane
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
        const auto put = [&](FloatLanes& lanes, FloatLanes number) {
            lanes = (FloatLanes)_mm512_mask_mov_ps((__m512)lanes, 1 << q, (__m512)number);
        };
        of_tile[q] = splat(largest_of(largest[q]));
        put(arrived, of_tile[q]);
        put(before, splat(maxima[q]));
        if (q == 0 || !see_alike) {
            const float found =
                share_scales(scores + q * kTileKeys, value_scales, num_keys, shares);
            most = q == 0 ? splat(found) : most;
            put(most, splat(found));
        }
    }
    const FloatLanes now = max_of(before, arrived);
    const FloatLanes decay = exp2_of_nonpositive(before - now);
    const FloatLanes arrival = exp2_of_nonpositive(arrived - now);
    _mm512_mask_storeu_ps(maxima, (1 << Q) - 1, (__m512)now);
    store(decays, decay);
    store(factors, arrival * (most * splat(1.0f / kLargestWeight)));
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
        if (!see_alike) share_scales(scores + q * kTileKeys, value_scales, num_keys, shares);
        FloatLanes total = {};
        for (int k = 0; k < num_keys; k += kLanes) {
            float* at = scores + q * kTileKeys + k;
            const FloatLanes weight = exp2_for_pairs(load(at) - of_tile[q]);
            total += weight;
            const __m512i integers = _mm512_cvtps_epi32((__m512)(weight * load(shares + k)));
            auto* bytes = reinterpret_cast<__m128i*>(at);
            _mm_store_si128(bytes, _mm512_cvtepi32_epi8(integers));
            _mm_store_si128(bytes + 1, _mm512_cvtepi32_epi8(_mm512_srli_epi32(integers, 8)));
        }
        float* sum = totals + q * kSumLanes;
        store(sum, load(sum) * splat(decay[q]) + total * splat(arrival[q]));
    }
}

// The values of the current tile, 4 keys and 64 columns at a time: a lane of vector c has a byte of
// each key, and 128-bit lane L the columns from 16 L + 4 c on.
class IntegerValues {
public:
    IntegerValues(const Call& call, const Scratch& scratch)
        : head_dim_(call.head_dim),
          padded_dim_(padded_head_dim(call.head_dim)),
          packed_(reinterpret_cast<uint8_t*>(scratch.values)) {}

    void bring(const TileRows<Int8>& tile, int num_queries, const TileRows<Int8>& next) {
        rows_ = tile.values;
        next_keys_ = next.keys;
        is_packed_ = num_queries > kMaxQueries;
        if (!is_packed_) return;
        for (int d = 0; d < head_dim_; d += kCodeColumns) {
            for (int unit = 0; unit < (tile.last + kKeysAtOnce - 1) / kKeysAtOnce; ++unit) {
                IntLanes codes[4];
                interleave(unit, d, codes);
                __builtin_memcpy(packed_at(unit, d), codes, sizeof(codes));
            }
        }
    }

    // For Q queries: sums = sums * decays + (sum of weights * values) * factors.
    template <int Q>
    PDSERVE_INLINE void add(const float* weights, int num_keys, Prefetcher& next,
        const float* decays, const float* factors, float* sums) const {
        in_pieces<Q>([&](int q, auto count) {
            const Sums of{decays + q, factors + q, sums + static_cast<int64_t>(q) * padded_dim_};
            for (int d = 0; d < head_dim_; d += kCodeColumns) {
                const auto add = [&](const auto& codes_at) {
                    add_columns<count.value>(
                        weights + q * kTileKeys, codes_at, num_keys / kKeysAtOnce, next, of, d);
                };
                if (is_packed_) {
                    add([&](int unit, IntLanes(&codes)[4]) {
                        load_vectors(packed_at(unit, d), codes);
                    });
                } else {
                    add([&](int unit, IntLanes(&codes)[4]) {
                        interleave(unit, d, codes);
                        prefetch_to_l1(next_keys_[unit * kKeysAtOnce] + d);
                    });
                }
            }
        });
    }

private:
    struct Sums {
        const float* decays;
        const float* factors;
        float* start;
    };

    // Of the next tile, 4 keys: the beginning of rows of codes, and what is behind it.
    PDSERVE_INLINE static void prefetch_to_l1(const Int8* keys) {
#pragma GCC unroll 8
        for (int i = 0; i <= kKeysAtOnce; ++i) {
            __builtin_prefetch(reinterpret_cast<const char*>(keys) + i * kLineBytes, 0, 3);
        }
    }

    uint8_t* packed_at(int unit, int d) const {
        return packed_ + (d / kCodeColumns * (kTileKeys / kKeysAtOnce) + unit) * 256;
    }

    PDSERVE_INLINE void interleave(int unit, int d, IntLanes (&codes)[4]) const {
        const Int8* const* rows = rows_ + unit * kKeysAtOnce;
        const auto row = [&](int i) {
            if (d + kCodeColumns <= head_dim_) return _mm512_loadu_si512(rows[i] + d);
            return _mm512_maskz_loadu_epi8((__mmask64{1} << (head_dim_ - d)) - 1, rows[i] + d);
        };
        const __m512i a = row(0), b = row(1), c = row(2), e = row(3);
        const __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
        const __m512i low_ce = _mm512_unpacklo_epi8(c, e), high_ce = _mm512_unpackhi_epi8(c, e);
        codes[0] = (IntLanes)_mm512_unpacklo_epi16(low_ab, low_ce);
        codes[1] = (IntLanes)_mm512_unpackhi_epi16(low_ab, low_ce);
        codes[2] = (IntLanes)_mm512_unpacklo_epi16(high_ab, high_ce);
        codes[3] = (IntLanes)_mm512_unpackhi_epi16(high_ab, high_ce);
    }

    template <int Q, class CodesAt>
    PDSERVE_INLINE void add_columns(const float* weights, const CodesAt& codes_at, int num_units,
        Prefetcher& next, const Sums& of, int d) const {
        IntLanes upper[Q][4] = {}, lower[Q][4] = {};
        for (int unit = 0; unit < num_units; ++unit) {
            IntLanes codes[4];
            codes_at(unit, codes);
            if (unit % 2 == 0) next.ask<kLinesAtCodes>();
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) {
                const IntLanes lowers = weights_at(weights + q * kTileKeys, unit, 0);
                const IntLanes uppers = weights_at(weights + q * kTileKeys, unit, 1);
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c) upper[q][c] = add_fours(upper[q][c], uppers, codes[c]);
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c) lower[q][c] = add_fours(lower[q][c], lowers, codes[c]);
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
            FloatLanes columns[4];
            in_order(upper[q], lower[q], columns);
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) {
                if (d + c * kLanes >= head_dim_) break;
                float* sum = of.start + q * padded_dim_ + d + c * kLanes;
                store(sum, multiply_add(
                    load(sum) * splat(of.decays[q]), columns[c], splat(of.factors[q])));
            }
        }
    }

    // 16 columns in each vector.
    PDSERVE_INLINE static void in_order(
        const IntLanes (&upper)[4], const IntLanes (&lower)[4], FloatLanes (&columns)[4]) {
        __m512 x[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            x[c] = _mm512_cvtepi32_ps((__m512i)((upper[c] << 8) + lower[c]));
        }
        const __m512 first = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
        const __m512 second = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
        const __m512 third = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
        const __m512 fourth = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
        columns[0] = (FloatLanes)_mm512_shuffle_f32x4(first, second, 0x88);
        columns[1] = (FloatLanes)_mm512_shuffle_f32x4(first, second, 0xdd);
        columns[2] = (FloatLanes)_mm512_shuffle_f32x4(third, fourth, 0x88);
        columns[3] = (FloatLanes)_mm512_shuffle_f32x4(third, fourth, 0xdd);
    }

    const int head_dim_;
    const int padded_dim_;
    uint8_t* const packed_;
    const Int8* const* rows_ = nullptr;
    const Int8* const* next_keys_ = nullptr;
    bool is_packed_ = false;
};

#endif

}  // namespace
}  // namespace pdserve::attention
