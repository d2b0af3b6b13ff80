// The online softmax (Milakov and Gimelshein): turns scores into weights tile by tile, and folds
// the states of runs.
#pragma once

#include "scratch.h"
#include "seeing.h"
#include "tile.h"

namespace pdserve::attention {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;

// Masks all keys of a tile except [first, last), which the query may see.
PDSERVE_INLINE void mask(float* scores, int first, int last, int num_keys) {
    for (int k = 0; k < first; ++k) scores[k] = kMinusInfinity;
    for (int k = last; k < num_keys; ++k) scores[k] = kMinusInfinity;
}

#if defined(PDSERVE_HAS_PAIRS) || defined(PDSERVE_TILES)
// 2**x for x <= 0, to be rounded to bfloat16. Its error is a sixteenth of that rounding error. The
// exponent is added to the bits. Results below 2**-126 become 0, since the conversion or the product
// treats denormals as zero. NaN stays NaN: its low bits are zero, as those of a bfloat16 are.
PDSERVE_INLINE FloatLanes exp2_for_pairs(FloatLanes x) {
    const FloatLanes clamped = x < splat(-127.0f) ? splat(-127.0f) : x;
    const FloatLanes shifted = clamped + splat(12582912.0f);  // see exp2_of_nonpositive
    const FloatLanes fraction = clamped - (shifted - splat(12582912.0f));
    FloatLanes p = splat(5.50089068710804e-2f);
    p = multiply_add(splat(2.422109842300415e-1f), p, fraction);
    p = multiply_add(splat(6.93282961845398e-1f), p, fraction);
    p = multiply_add(splat(1.0f), p, fraction);
    return (FloatLanes)((IntLanes)p + ((IntLanes)shifted << 23));
}
#endif

// The scales of values that a query sees; 0 for others, whose scale may be NaN.
PDSERVE_INLINE FloatLanes seen_scales(FloatLanes scores, const float* scales) {
    return scores == splat(kMinusInfinity) ? FloatLanes{} : load(scales);
}

// Replaces the scores of one query by weights, and adds the weights to `totals`. As pairs of
// bfloat16, weights are rounded before they are added, so that the denominator matches the weights
// that are used. Where values are codes, the weights that are used have their scales in them.
template <bool kAsPairs, bool kHasScales>
PDSERVE_INLINE void weigh_query(float* scores, FloatLanes maximum, int num_keys, float* totals,
    FloatLanes decay, const float* scales, Prefetcher& next) {
#if defined(PDSERVE_HAS_PAIRS)
    if constexpr (kAsPairs) {
        constexpr int kVectors = kSumLanes / kLanes;
        const PairLanes ones = pairs_of_ones();
        FloatLanes total[kVectors];
        for (int v = 0; v < kVectors; ++v) total[v] = load(totals + v * kLanes) * decay;
        for (int start = 0; start < num_keys; start += 2 * kSumLanes) {
            next.ask<kLinesAtWeighing>();
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const int k = start + v * 2 * kLanes;
                if (k >= num_keys) break;
                const FloatLanes low_scores = load(scores + k);
                FloatLanes low = exp2_for_pairs(low_scores - maximum);
                FloatLanes high = {};
                if constexpr (kHasScales) total[v] += low;
                if constexpr (kHasScales) low = low * seen_scales(low_scores, scales + k);
                if (k + kLanes < num_keys) {
                    const FloatLanes high_scores = load(scores + k + kLanes);
                    high = exp2_for_pairs(high_scores - maximum);
                    if constexpr (kHasScales) {
                        total[v] += high;
                        high = high * seen_scales(high_scores, scales + k + kLanes);
                    }
                }
                const PairLanes pairs = to_pairs(low, high);
                store(scores + k / 2, pairs);
                if constexpr (!kHasScales) total[v] = multiply_add(total[v], pairs, ones);
            }
        }
        for (int v = 0; v < kVectors; ++v) store(totals + v * kLanes, total[v]);
        return;
    }
#endif
    next.ask<kLinesAtWeighing>();
    for (int lane = 0; lane < kSumLanes; lane += kLanes) {
        FloatLanes total = load(totals + lane) * decay;
        for (int k = lane; k < num_keys; k += kSumLanes) {
            const FloatLanes of_keys = load(scores + k);
            const FloatLanes weight = exp2_of_nonpositive(of_keys - maximum);
            if constexpr (kHasScales) {
                store(scores + k, weight * seen_scales(of_keys, scales + k));
            } else {
                store(scores + k, weight);
            }
            total += weight;
        }
        store(totals + lane, total);
    }
}

// Scales the scores of Q queries, and raises `largest` to the largest in each lane.
template <int kLines, int Q>
PDSERVE_INLINE void scale_scores(
    float* scores, float factor, int num_keys, FloatLanes (&largest)[Q], Prefetcher& next) {
    const FloatLanes scale = splat(factor);
    for (int k = 0; k < num_keys; k += kLanes) {
        next.ask<kLines>();
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const FloatLanes scaled = load(scores + q * kTileKeys + k) * scale;
            store(scores + q * kTileKeys + k, scaled);
            largest[q] = max_of(largest[q], scaled);
        }
    }
}

// Turns the scores of Q queries into weights 2 ** (score * scale - maximum), and updates the
// queries' maxima and totals with this tile. Prefetches the next tile meanwhile.
template <int Q, bool kAsPairs, bool kHasScales>
PDSERVE_INLINE void weigh(float* scores, float factor, int num_keys, float* maxima, float* totals,
    float* decays, const float* value_scales, Prefetcher& next) {
    FloatLanes largest[Q];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) largest[q] = splat(maxima[q]);
    scale_scores<kLinesAtWeighing>(scores, factor, num_keys, largest, next);
    FloatLanes maximum[Q], decay[Q];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) maximum[q] = splat(largest_of(largest[q]));
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
        decay[q] = exp2_of_nonpositive(splat(maxima[q]) - maximum[q]);
        maxima[q] = maximum[q][0];
        decays[q] = decay[q][0];
    }
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
        weigh_query<kAsPairs, kHasScales>(scores + q * kTileKeys, maximum[q], num_keys,
            totals + q * kSumLanes, decay[q], value_scales, next);
    }
}

// Folds the state of a run into the state of all runs before it, for one query. Never inlined, so
// that the result has the same bits for every caller.
[[gnu::noinline]] void fold_query(const State& run, const State& result, int q, int padded_dim) {
    const FloatLanes before = splat(result.maxima[q]), now = splat(run.maxima[q]);
    const FloatLanes maximum = max_of(before, now);
    const FloatLanes decay = exp2_of_nonpositive(before - maximum);
    const FloatLanes weight = exp2_of_nonpositive(now - maximum);
    result.maxima[q] = maximum[0];
    const auto fold = [&](const float* from, float* to, int count) {
        for (int i = 0; i < count; i += kLanes) {
            store(to + i, multiply_add(load(to + i) * decay, load(from + i), weight));
        }
    };
    const int64_t first = static_cast<int64_t>(q) * padded_dim;
    fold(run.sums + first, result.sums + first, padded_dim);
    fold(run.totals + q * kSumLanes, result.totals + q * kSumLanes, kSumLanes);
}

// The score of a query head's sink, as the maxima are.
PDSERVE_INLINE float sink_score(const Call& call, const Seeing& seeing, int kv_head, int query) {
    return call.sinks[kv_head * seeing.group_size + query % seeing.group_size] * kLog2E;
}

PDSERVE_INLINE void reset(const State& state, int num_queries, int padded_dim) {
    const size_t count = num_queries;
    __builtin_memset(state.sums, 0, count * padded_dim * sizeof(float));
    __builtin_memset(state.totals, 0, count * kSumLanes * sizeof(float));
    for (int q = 0; q < num_queries; ++q) state.maxima[q] = kMinusInfinity;
}

}  // namespace
}  // namespace pdserve::attention
