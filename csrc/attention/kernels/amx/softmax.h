// The online softmax of attention through tiles: turns the scores of 16 queries into weights.
//
// Scores are [keys][queries]; weights are [queries][keys], of bfloat16.
#pragma once

#include "../pack.h"
#include "../softmax.h"
#include "scratch.h"

namespace pdserve::attention {
namespace {

constexpr int kTilesOfKeys = kTileKeys / 16;
constexpr int kPairs = kTileKeys / 2;
constexpr int kFewQueries = 6;

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
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
        24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
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

class TileSoftmax {
public:
    // maxima: [tiles * 16], the largest scores of a run so far.
    TileSoftmax(const Call& call, const TileScratch& scratch, float* maxima, int num_queries)
        : scale_(call.scale * kLog2E),
          window_(call.sliding_window),
          scratch_(scratch),
          maxima_(maxima),
          num_queries_(num_queries) {}

    // Hides the scores of keys from the tile's queries that do not see them.
    void mask(int tile, int tile_start, int num_keys) const {
        const auto positions = load_as<IntLanes>(scratch_.positions + tile * kTileQueries);
        const SeenKeys seen{tile_start, window_};
        for (int k = 0; k < num_keys; ++k) {
            float* score = scratch_.scores + k * kTileQueries;
            store(score, seen.by(positions, k) ? load(score) : splat(kMinusInfinity));
        }
    }

    // Weighs the first num_keys keys for a tile of queries. Returns whether earlier sums decay, by
    // scratch.decays.
    bool weigh(int tile, int num_keys) const {
        return num_queries_ <= kFewQueries ? weigh_few(num_keys) : weigh_many(tile, num_keys);
    }

private:
    // With one query in each lane.
    bool weigh_many(int tile, int num_keys) const {
        const FloatLanes scale = splat(scale_);
        bool decays;
        const FloatLanes base =
            new_maximum(tile * kTileQueries, largest_score(num_keys) * scale, decays);
        auto* pairs = reinterpret_cast<uint32_t*>(scratch_.pairs);
        const int end = (num_keys + 31) / 32 * 32;
        for (int k = 0; k < end; k += 2) {
            const PairLanes pair = pairs_of(
                weight(k, num_keys, scale, base), weight(k + 1, num_keys, scale, base));
            store(pairs + k / 2 * kTileQueries, pair);
        }
        transpose_weights(end);
        return decays;
    }

    // Returns the new maximum of the lanes' queries, and notes what becomes of earlier sums.
    PDSERVE_INLINE FloatLanes new_maximum(
        int first_query, FloatLanes largest, bool& decays) const {
        float* maxima = maxima_ + first_query;
        const FloatLanes before = load(maxima);
        const FloatLanes maximum = max_of(before, largest);
        store(maxima, maximum);
        // Where nothing has been seen yet, everything is minus infinity, and all weights are 0.
        const FloatLanes base = maximum == splat(kMinusInfinity) ? FloatLanes{} : maximum;
        const FloatLanes decay = exp2_of_nonpositive(before - base);
        store(scratch_.decays, decay);
        decays = any((IntLanes)(decay != splat(1.0f)));
        return base;
    }

    // The same query by query, with keys in the lanes.
    bool weigh_few(int num_keys) const {
        const FloatLanes scale = splat(scale_);
        FloatLanes scores[kFewQueries][kTilesOfKeys];
        FloatLanes largest = splat(kMinusInfinity);
        const int end = (num_keys + 15) / 16;
        for (int k = num_keys; k < end * 16; ++k) {
            store(scratch_.scores + k * kTileQueries, splat(kMinusInfinity));
        }
        for (int q = 0; q < num_queries_; ++q) {
            FloatLanes of_query = splat(kMinusInfinity);
            for (int i = 0; i < end; ++i) {
                scores[q][i] = column(scratch_.scores + i * 16 * kTileQueries + q);
                of_query = max_of(of_query, scores[q][i]);
            }
            largest[q] = largest_of(of_query);
        }
        bool decays;
        const FloatLanes base = new_maximum(0, largest * scale, decays);
        for (int q = 0; q < num_queries_; ++q) {
            const FloatLanes of_query = splat(base[q]);
            BFloat16* weights = reinterpret_cast<BFloat16*>(scratch_.weights) + q * kTileKeys;
            for (int i = 0; i < kTilesOfKeys; ++i) {
                const FloatLanes weight = i < end
                    ? exp2_for_pairs(multiply_add(-of_query, scores[q][i], scale))
                    : FloatLanes{};
                store(weights + i * 16, weight);
            }
        }
        return decays;
    }

    // 16 scores of a query.
    PDSERVE_INLINE static FloatLanes column(const float* scores) {
#if defined(__AVX512F__)
        const __m512i rows = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176,
            192, 208, 224, 240);
        return (FloatLanes)_mm512_i32gather_ps(rows, scores, sizeof(float));
#else
        FloatLanes lanes;
        for (int i = 0; i < kLanes; ++i) lanes[i] = scores[i * kTileQueries];
        return lanes;
#endif
    }

    // Several chains, so that they do not wait for each other.
    FloatLanes largest_score(int num_keys) const {
        constexpr int kChains = 4;
        FloatLanes largest[kChains];
        for (FloatLanes& chain : largest) chain = splat(kMinusInfinity);
        int k = 0;
        for (; k + kChains <= num_keys; k += kChains) {
#pragma GCC unroll 4
            for (int i = 0; i < kChains; ++i) {
                largest[i] = max_of(largest[i], load(scratch_.scores + (k + i) * kTileQueries));
            }
        }
        for (; k < num_keys; ++k) {
            largest[0] = max_of(largest[0], load(scratch_.scores + k * kTileQueries));
        }
        return max_of(max_of(largest[0], largest[1]), max_of(largest[2], largest[3]));
    }

    PDSERVE_INLINE FloatLanes weight(int k, int num_keys, FloatLanes scale, FloatLanes base) const {
        if (k >= num_keys) return FloatLanes{};
        return exp2_for_pairs(multiply_add(-base, load(scratch_.scores + k * kTileQueries), scale));
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

    const float scale_;
    const int window_;
    const TileScratch& scratch_;
    float* const maxima_;
    const int num_queries_;
};

}  // namespace
}  // namespace pdserve::attention
