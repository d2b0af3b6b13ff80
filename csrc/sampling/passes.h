// Passes over one row: each reads it once, from front to back, at the speed of memory.
//
// launch.cpp has checked all arguments.
#pragma once

#include "exp2.h"
#include "kernel.h"

namespace pdserve::sampling {
namespace {

constexpr int kHalf = kLanes / 2;
constexpr float kMinusInfinity = -__builtin_inff();

typedef float HalfFloatLanes __attribute__((vector_size(kHalf * 4)));
typedef double DoubleLanes __attribute__((vector_size(kHalf * 8)));

PDSERVE_INLINE DoubleLanes widen(HalfFloatLanes lanes) {
#if defined(__AVX512F__)
    return _mm512_cvtps_pd(lanes);
#else
    return __builtin_convertvector(lanes, DoubleLanes);
#endif
}

// The sum of a vector's lanes, in float64.
struct DoubleSum {
    DoubleLanes low{};
    DoubleLanes high{};

    PDSERVE_INLINE void add(FloatLanes lanes) {
        HalfFloatLanes halves[2];
        __builtin_memcpy(halves, &lanes, sizeof(lanes));
        low += widen(halves[0]);
        high += widen(halves[1]);
    }

    PDSERVE_INLINE double total() const {
        const DoubleLanes both = low + high;
        double sum = 0.0;
        for (int i = 0; i < kHalf; ++i) sum += both[i];
        return sum;
    }
};

PDSERVE_INLINE bool any(IntLanes lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    int32_t values[kLanes], result = 0;
    store(values, lanes);
    for (int32_t value : values) result |= value;
    return result != 0;
#endif
}

// Calls body(first, lanes) for each vector of a row; the last one is padded with -inf.
template <class Body>
PDSERVE_INLINE void for_vectors(const float* row, int64_t size, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) body(i, load(row + i));
    if (i == size) return;
    float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
        rest[lane] = i + lane < size ? row[i + lane] : kMinusInfinity;
    }
    body(i, load(rest));
}

// The largest of up to kBlock logits; `nan` gets lanes set where there is a NaN.
PDSERVE_INLINE float largest_in(const float* block, int64_t size, IntLanes& nan) {
    constexpr int kChains = 4;  // hide the latency of a comparison
    FloatLanes largest[kChains];
    for (FloatLanes& lanes : largest) lanes = splat(kMinusInfinity);
    int64_t i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
            const FloatLanes lanes = load(block + i + c * kLanes);
            nan |= lanes != lanes;
            largest[c] = max_of(lanes, largest[c]);
        }
    }
    for_vectors(block + i, size - i, [&](int64_t, FloatLanes lanes) {
        nan |= lanes != lanes;
        largest[0] = max_of(lanes, largest[0]);
    });
    return largest_of(max_of(max_of(largest[0], largest[1]), max_of(largest[2], largest[3])));
}

// The first index in [start, end) with this value, which must be there.
PDSERVE_INLINE int64_t first_of(float value, const float* logits, int64_t start, int64_t end) {
    const FloatLanes wanted = splat(value);
    while (start + kLanes <= end && !any(load(logits + start) == wanted)) start += kLanes;
    while (logits[start] != value) ++start;
    return start;
}

Peak peak_of(const float* logits, int64_t vocab_size) {
    float largest = kMinusInfinity;
    int64_t block = 0;
    IntLanes nan{};
    for (int64_t start = 0; start < vocab_size; start += kBlock) {
        const int64_t size = vocab_size - start < kBlock ? vocab_size - start : kBlock;
        const float in_block = largest_in(logits + start, size, nan);
        block = in_block > largest ? start : block;
        largest = in_block > largest ? in_block : largest;
    }
    if (any(nan)) return {__builtin_nanf(""), 0};
    const int64_t last = block + kBlock < vocab_size ? block + kBlock : vocab_size;
    return {largest, static_cast<int32_t>(first_of(largest, logits, block, last))};
}

void block_maxima(const float* weights, int64_t vocab_size, float* maxima) {
    IntLanes nan{};
    for (int64_t i = 0; i < vocab_size; i += kSmallBlock) {
        maxima[i / kSmallBlock] = largest_in(weights + i, kSmallBlock, nan);
    }
}

void mask(const float* logits, int64_t vocab_size, const uint32_t* mask, float* masked) {
    constexpr int kWordBits = 32;
    PairLanes bit;  // of each lane, in the lowest bits of a word
    for (int lane = 0; lane < kLanes; ++lane) bit[lane] = 1u << lane;
    int64_t i = 0;
    for (; i + kLanes <= vocab_size; i += kLanes) {
        const PairLanes bits = splat(mask[i / kWordBits] >> (i % kWordBits)) & bit;
        store(masked + i, bits != PairLanes{} ? load(logits + i) : splat(kMinusInfinity));
    }
    for (; i < vocab_size; ++i) {
        const bool is_allowed = mask[i / kWordBits] >> (i % kWordBits) & 1;
        masked[i] = is_allowed ? logits[i] : kMinusInfinity;
    }
}

void weigh(const float* logits, int64_t vocab_size, float peak, float scale, float* weights) {
    for_vectors(logits, vocab_size, [&](int64_t i, FloatLanes lanes) {
        const FloatLanes x = (lanes - splat(peak)) * splat(scale);
        store(weights + i, to_units(exp2_rounded_alike(x)));
    });
    for (int64_t i = vocab_size; i < padded_size(vocab_size); ++i) weights[i] = 0.0f;
}

double sum(const float* weights, int64_t vocab_size, float floor, double* block_sums) {
    double total = 0.0;
    const FloatLanes least = splat(floor);
    for (int64_t start = 0; start < vocab_size; start += kBlock) {
        DoubleSum in_block[2];
#pragma GCC unroll 2
        for (int64_t i = start; i < start + kBlock; i += 2 * kLanes) {
            const FloatLanes first = load(weights + i), second = load(weights + i + kLanes);
            in_block[0].add(first < least ? splat(0.0f) : first);
            in_block[1].add(second < least ? splat(0.0f) : second);
        }
        const double block_sum = in_block[0].total() + in_block[1].total();
        block_sums[start / kBlock] = block_sum;
        total += block_sum;
    }
    return total;
}

int64_t collect(const float* weights, int64_t num, float low, float high, float* out) {
    int64_t count = 0, i = 0;
    const auto collect_one = [&](int64_t j) {
        const float weight = weights[j];
        out[count] = weight;
        count += (weight >= low) & (weight < high);
    };
    for (; i + kLanes <= num; i += kLanes) {
        const FloatLanes lanes = load(weights + i);
#if defined(__AVX512F__)
        const __mmask16 is_in = _mm512_cmp_ps_mask(lanes, splat(low), _CMP_GE_OQ)
            & _mm512_cmp_ps_mask(lanes, splat(high), _CMP_LT_OQ);
        _mm512_storeu_ps(out + count, _mm512_maskz_compress_ps(is_in, lanes));
        count += __builtin_popcount(is_in);
#else
        if (!any((lanes >= splat(low)) & (lanes < splat(high)))) continue;
        for (int64_t j = i; j < i + kLanes; ++j) collect_one(j);
#endif
    }
    for (; i < num; ++i) collect_one(i);
    return count;
}

double exp_sum(const float* logits, int64_t vocab_size, float peak) {
    DoubleSum result;
    for_vectors(logits, vocab_size, [&](int64_t, FloatLanes lanes) {
        const FloatLanes x = (lanes - splat(peak)) * splat(kLog2E);
        result.add(exp2_rounded_alike(x));
    });
    return result.total();
}

void rank(const float* logits, int64_t vocab_size, int num, float* values, int32_t* ids) {
    int count = 0;
    float least = kMinusInfinity;  // of a full list
    const auto insert = [&](float value, int64_t id) {
        if (count == num && !(value > least)) return;
        int place = count < num ? count++ : num - 1;
        for (; place > 0 && values[place - 1] < value; --place) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = value;
        ids[place] = static_cast<int32_t>(id);
        least = values[count - 1];
    };
    for_vectors(logits, vocab_size, [&](int64_t i, FloatLanes lanes) {
        if (count == num && !any(lanes > splat(least))) return;
        for (int lane = 0; lane < kLanes && i + lane < vocab_size; ++lane) {
            insert(lanes[lane], i + lane);
        }
    });
}

}  // namespace
}  // namespace pdserve::sampling
