// The functions that each build of the sampling kernels provides: passes over one row of logits or
// weights. No inline functions with external linkage here; see isa/element.h for why.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve::sampling {

// A weight is a probability divided by that of the likeliest token: in [0, 1], and a multiple of
// this. So a float64 sum of weights is exact, whatever the order, the vector width or the device.
constexpr double kWeightUnit = 1.0 / (int64_t{1} << 34);
constexpr int64_t kMaxVocabSize = int64_t{1} << 19;  // then 53 bits hold any sum

constexpr int64_t kBlock = 1024;  // tokens; the grain in which a row is summed and searched
constexpr int64_t kSmallBlock = 256;

namespace {

// Rows of weights have this much room, and zeros behind their last one.
[[maybe_unused]] constexpr int64_t padded_size(int64_t vocab_size) {
    return (vocab_size + kBlock - 1) / kBlock * kBlock;
}

}  // namespace

struct Peak {
    float logit;  // the largest; NaN if there is a NaN
    int32_t token_id;  // the lowest among equals
};

struct Kernels {
    Peak (*peak_of)(const float* logits, int64_t vocab_size);

    // Copies the logits whose bit in `mask` is set (bit i % 32 of word i / 32); the others become
    // -inf.
    void (*mask)(const float* logits, int64_t vocab_size, const uint32_t* mask, float* masked);

    // weights[i] = 2 ** ((logits[i] - peak) * scale), rounded to units; zeros in the padding.
    void (*weigh)(const float* logits, int64_t vocab_size, float peak, float scale, float* weights);

    // Sums the weights that are at least `floor`: for each block, and for the row.
    double (*sum)(const float* weights, int64_t vocab_size, float floor, double* block_sums);

    // The largest weight of every kSmallBlock tokens.
    void (*block_maxima)(const float* weights, int64_t vocab_size, float* maxima);

    // Copies the weights in [low, high), in order, and returns how many. `out` has room for one
    // vector more.
    int64_t (*collect)(const float* weights, int64_t num, float low, float high, float* out);

    // The sum of e ** (logit - peak), not rounded to units.
    double (*exp_sum)(const float* logits, int64_t vocab_size, float peak);

    // The `num` largest logits in descending order, the lowest id first among equals.
    void (*rank)(const float* logits, int64_t vocab_size, int num, float* values, int32_t* ids);
};

extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kNeonBf16Kernels;
extern const Kernels kPortableKernels;

}  // namespace pdserve::sampling
