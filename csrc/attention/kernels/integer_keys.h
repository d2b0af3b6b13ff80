// Scores from int8 codes as the pool has them, with AVX512-VNNI. Queries become integers of 16 bits,
// in two planes of 8: 256 * upper + lower. Codes are multiplied by 4 bytes at a time, and the sums
// are exact. So nothing is lost but that rounding, a hundredth of that of the codes.
#pragma once

#include "products.h"
#include "scratch.h"
#include "tile.h"

namespace pdserve::attention {
namespace {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define PDSERVE_HAS_INTEGER_ROWS

constexpr int kCodesAtOnce = kLanes;  // of a key: 128 bits
constexpr int kGroupOfKeys = 16;
constexpr int kLinesAtCodes = 8;    // as in tile.h: each 32 codes of 16 keys, each 8 values
constexpr int kIntegerQueries = 3;  // that the registers have sums for
constexpr int kWideHead = 512;      // up to which sums of whole 16-bit integers fit into 32 bits

// Calls body(first, Count<n>) for Q queries, in pieces.
template <int Q, class Body>
PDSERVE_INLINE void in_pieces(const Body& body) {
    if constexpr (Q <= kIntegerQueries) {
        body(0, Count<Q>{});
    } else {
        body(0, Count<(Q + 1) / 2>{});
        body((Q + 1) / 2, Count<Q / 2>{});
    }
}

PDSERVE_INLINE IntLanes add_fours(IntLanes sum, IntLanes bytes, IntLanes signed_bytes) {
    return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)signed_bytes);
}

PDSERVE_INLINE void load_vectors(const uint8_t* source, IntLanes (&vectors)[4]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) vectors[i] = load_as<IntLanes>(source + i * sizeof(IntLanes));
}

PDSERVE_INLINE IntLanes broadcast_16_bytes(const uint8_t* source) {
    return (IntLanes)_mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

// A query: of each 16 integers, the upper bytes and then the lower ones; and behind them these.
struct QueryNumbers {
    float scale;
    int32_t zero_sum;  // codes are multiplied as bytes that are greater by 128
};

// One that is not finite has a scale of NaN, and so have its scores.
[[maybe_unused]] void quantise_query(
    const BFloat16* query, int head_dim, int padded_dim, void* row) {
    const auto load_16 = [&](int d) {
        const int left = head_dim - d;
        const __mmask16 there = left >= kLanes ? 0xffff : (1 << left) - 1;
        return (FloatLanes)(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, query + d)), 16));
    };
    FloatLanes magnitudes = {}, not_finite = {};
    for (int d = 0; d < padded_dim; d += kLanes) {
        const FloatLanes x = load_16(d);
        magnitudes = max_of(x < splat(0.0f) ? -x : x, magnitudes);
        not_finite += x * splat(0.0f);
    }
    const float most = head_dim <= kWideHead ? 32639.0f : 32639.0f * kWideHead / head_dim;
    const float largest = largest_of(magnitudes), nothing = sum_of(not_finite);
    const float factor = largest >= 0x1p-100f ? most / largest : 0.0f;
    IntLanes sum = {};
    auto* target = static_cast<uint8_t*>(row);
    for (int d = 0; d < padded_dim; d += kLanes) {
        const auto q = (IntLanes)_mm512_cvtps_epi32((__m512)(load_16(d) * splat(factor)));
        const IntLanes upper = (q + 128) >> 8;
        store(target + 2 * d, _mm512_cvtepi32_epi8((__m512i)upper));
        store(target + 2 * d + kLanes, _mm512_cvtepi32_epi8((__m512i)q));
        sum += q;
    }
    const QueryNumbers numbers{
        largest / most + nothing, -128 * _mm512_reduce_add_epi32((__m512i)sum)};
    __builtin_memcpy(target + 2 * padded_dim, &numbers, sizeof(numbers));
}

// 16 bytes of each of 16 rows at equal distances: vector r holds, in its 128-bit lane L, those of row
// 4 L + r.
PDSERVE_INLINE void load_16_rows(const Int8* first, int64_t stride, __m512i (&lanes)[4]) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
        const auto of_row = [&](int lane) {
            return _mm_loadu_si128(
                reinterpret_cast<const __m128i*>(first + (4 * lane + r) * stride));
        };
        lanes[r] = _mm512_castsi128_si512(of_row(0));
        lanes[r] = _mm512_mask_broadcast_i32x4(lanes[r], 0x00f0, of_row(1));
        lanes[r] = _mm512_mask_broadcast_i32x4(lanes[r], 0x0f00, of_row(2));
        lanes[r] = _mm512_mask_broadcast_i32x4(lanes[r], 0xf000, of_row(3));
    }
}

// The scales of 16 rows at equal distances, of 16 codes or more.
PDSERVE_INLINE FloatLanes load_scales(const Int8* first, int64_t stride, int head_dim) {
    __m512i ends[4];
    load_16_rows(first + head_dim - 12, stride, ends);
    return (FloatLanes)_mm512_unpackhi_epi64(
        _mm512_unpackhi_epi32(ends[0], ends[1]), _mm512_unpackhi_epi32(ends[2], ends[3]));
}

// Reads 16 codes of each of 16 keys, greater by 128.
class IntegerKeyRows {
public:
    // Their values, which will be wanted soon, are brought to the L1 cache meanwhile.
    IntegerKeyRows(const Int8* first, int64_t stride, const void* values)
        : first_(first), stride_(stride), values_(static_cast<const char*>(values)) {}

    PDSERVE_INLINE void next(IntLanes (&codes)[4]) {
        __m512i rows[4];
        load_16_rows(first_, stride_, rows);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            codes[r] = (IntLanes)_mm512_xor_si512(rows[r], _mm512_set1_epi8(-128));
        }
        first_ += kCodesAtOnce;
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(values_ + i * kLineBytes, 0, 3);
        values_ += kLines * kLineBytes;
    }

private:
    static constexpr int kLines = kGroupOfKeys * kCodesAtOnce / kLineBytes;

    const Int8* first_;
    const int64_t stride_;
    const char* values_;
};

// What IntegerKeyRows has read.
class PackedIntegers {
public:
    explicit PackedIntegers(const uint8_t* start) : at_(start) {}

    PDSERVE_INLINE void next(IntLanes (&codes)[4]) {
        load_vectors(at_, codes);
        at_ += sizeof(codes);
    }

private:
    const uint8_t* at_;
};

// As sum_of_partials (quads.h).
PDSERVE_INLINE IntLanes sum_of_fours(const IntLanes (&partials)[4]) {
    const auto add_halves = [](IntLanes a, IntLanes b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32((__m512i)a, (__m512i)b),
            _mm512_unpackhi_epi32((__m512i)a, (__m512i)b));
    };
    const __m512i low = add_halves(partials[0], partials[1]);
    const __m512i high = add_halves(partials[2], partials[3]);
    return (IntLanes)_mm512_add_epi32(
        _mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}

template <int Q, class Keys>
PDSERVE_INLINE void score_16_codes(const uint8_t* queries, int64_t query_stride, Keys keys,
    int padded_dim, Prefetcher& next, const float* key_scales, float* scores) {
    IntLanes upper[Q][4] = {}, lower[Q][4] = {};
    for (int d = 0; d < padded_dim; d += kCodesAtOnce) {
        IntLanes codes[4];
        keys.next(codes);
        if (d % (2 * kCodesAtOnce) == 0) next.ask<kLinesAtCodes>();
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
            const IntLanes uppers = broadcast_16_bytes(queries + q * query_stride);
            const IntLanes lowers = broadcast_16_bytes(queries + q * query_stride + kCodesAtOnce);
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) upper[q][r] = add_fours(upper[q][r], codes[r], uppers);
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) lower[q][r] = add_fours(lower[q][r], codes[r], lowers);
        }
        queries += 2 * kCodesAtOnce;
    }
    const FloatLanes scales = load(key_scales);
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
        QueryNumbers numbers;
        __builtin_memcpy(&numbers, queries + q * query_stride, sizeof(numbers));
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) lower[q][r] += upper[q][r] << 8;
        const IntLanes sum = sum_of_fours(lower[q]) + numbers.zero_sum;
        const FloatLanes score = __builtin_convertvector(sum, FloatLanes);
        store(scores + q * kTileKeys, score * splat(numbers.scale) * scales);
    }
}

// The keys of the current tile. Rows that are not adjacent in memory, or not a multiple of 16 long,
// are copied first.
class IntegerKeys {
public:
    IntegerKeys(const Call& call, const Scratch& scratch)
        : head_dim_(call.head_dim),
          padded_dim_(padded_head_dim(call.head_dim)),
          is_in_place_(padded_dim_ == head_dim_ && call.block_size % kGroupOfKeys == 0),
          scales_(scratch.key_scales),
          copies_(reinterpret_cast<Int8*>(scratch.key_rows)),
          packed_(reinterpret_cast<uint8_t*>(scratch.packed_keys)) {}

    void bring(const TileRows<Int8>& tile, int num_queries, const TileRows<Int8>&) {
        is_packed_ = num_queries > kMaxQueries;
        for (int k = 0; k < tile.last; k += kGroupOfKeys) {
            const Int8* const* keys = tile.keys + k;
            groups_[k / kGroupOfKeys] = {keys[0], keys[1] - keys[0], tile.values[k]};
            if (!is_in_place_) copy(keys, k);
            if (is_packed_) pack(k);
        }
    }

    template <int Q>
    PDSERVE_INLINE void score(
        const uint32_t* queries, int num_keys, Prefetcher& next, float* scores) const {
        const int64_t stride = padded_dim_ * static_cast<int64_t>(sizeof(float));
        for (int k = 0; k < num_keys; k += kGroupOfKeys) {
            in_pieces<Q>([&](int q, auto count) {
                const auto* start = reinterpret_cast<const uint8_t*>(queries) + q * stride;
                float* target = scores + q * kTileKeys + k;
                if (is_packed_) {
                    score_16_codes<count.value>(start, stride, PackedIntegers(packed_at(k)),
                        padded_dim_, next, scales_ + k, target);
                } else {
                    score_16_codes<count.value>(
                        start, stride, rows_at(k), padded_dim_, next, scales_ + k, target);
                }
            });
        }
    }

private:
    struct Group {
        const Int8* first;
        int64_t stride;
        const Int8* values;
    };

    PDSERVE_INLINE IntegerKeyRows rows_at(int k) const {
        const Group& group = groups_[k / kGroupOfKeys];
        if (is_in_place_) return {group.first, group.stride, group.values};
        return {copies_ + k * padded_dim_, padded_dim_, group.values};
    }

    uint8_t* packed_at(int k) const { return packed_ + k * padded_dim_; }

    void copy(const Int8* const* keys, int k) const {
        Int8* row = copies_ + k * padded_dim_;
        for (int i = 0; i < kGroupOfKeys; ++i, row += padded_dim_) {
            __builtin_memcpy(row, keys[i], head_dim_);
            __builtin_memset(row + head_dim_, 0, padded_dim_ - head_dim_);
        }
    }

    void pack(int k) const {
        IntegerKeyRows rows = rows_at(k);
        uint8_t* target = packed_at(k);
        for (int d = 0; d < padded_dim_; d += kCodesAtOnce) {
            IntLanes codes[4];
            rows.next(codes);
            __builtin_memcpy(target, codes, sizeof(codes));
            target += sizeof(codes);
        }
    }

    const int head_dim_;
    const int padded_dim_;
    const bool is_in_place_;
    const float* const scales_;
    Int8* const copies_;
    uint8_t* const packed_;
    Group groups_[kTileKeys / kGroupOfKeys];
    bool is_packed_ = false;
};

#endif

}  // namespace
}  // namespace pdserve::attention
