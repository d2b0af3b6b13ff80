// Radix selection: weights above 0 have the same order as their bits. Three levels of buckets look
// at the upper, the middle and the lowest bits; each level looks only at the weights in the bucket
// that the level above found. If few weights are left, they are sorted instead. Bucket sums are
// exact, so both ways give the same result.

#include "select.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace pdserve::sampling {

namespace {

constexpr uint32_t kLowest = std::bit_cast<uint32_t>(static_cast<float>(kWeightUnit));
constexpr uint32_t kHighest = std::bit_cast<uint32_t>(1.0f);

// Number of bits below each level: an octave has 64 buckets, each of these 2048, and each of those
// 64.
constexpr int kLevels[] = {17, 6, 0};
constexpr int64_t kMaxBuckets = (kHighest >> kLevels[0]) - (kLowest >> kLevels[0]) + 1;
static_assert(kMaxBuckets >= 1 << (kLevels[0] - kLevels[1]));

constexpr int64_t kFewWeights = 128;

// Neighbouring weights use different copies, since consecutive additions to one bucket would wait
// for each other.
constexpr int64_t kCopies = 4;

template <Amount amount>
double amount_of(float weight) {
    return amount == Amount::kOne ? 1.0 : static_cast<double>(weight);
}

// Sums the weights whose bits are in [low, high), in buckets of 2**shift.
template <Amount amount>
class Buckets {
public:
    Buckets(const float* weights, int64_t num, uint32_t low, uint32_t high, int shift)
        : last_((high - 1 - low) >> shift) {
        std::fill_n(sums_, (last_ + 1) * kCopies, 0.0);
        for (int64_t i = 0; i < num; ++i) {
            const uint32_t bucket = (std::bit_cast<uint32_t>(weights[i]) - low) >> shift;
            sums_[bucket * kCopies + i % kCopies] += amount_of<amount>(weights[i]);
        }
    }

    // Searches from the last bucket down for the one with which `above` reaches `wanted`; -1 if
    // none. `above` is then the sum of the buckets after it.
    int64_t find(double wanted, double& above) const {
        for (int64_t bucket = last_; bucket >= 0; --bucket) {
            double sum = 0.0;
            for (int64_t copy = 0; copy < kCopies; ++copy) sum += sums_[bucket * kCopies + copy];
            if (above + sum >= wanted) return bucket;
            above += sum;
        }
        return -1;
    }

private:
    const int64_t last_;
    double sums_[kMaxBuckets * kCopies];
};

template <Amount amount>
float select_by_sorting(float* weights, int64_t num, double above, double wanted) {
    std::sort(weights, weights + num, std::greater<float>());
    for (int64_t i = 0; i < num; ++i) {
        above += amount_of<amount>(weights[i]);
        if (above >= wanted) return weights[i];
    }
    return 0.0f;
}

template <Amount amount>
float select_by(const Kernels& kernels, const float* weights, int64_t num, float least,
    double wanted, float* spare) {
    uint32_t low = kLowest >> kLevels[0] << kLevels[0], high = kHighest + 1;  // bits in [low, high)
    double above = 0.0;  // amount of the weights from `high` up
    for (const int shift : kLevels) {
        const float start = std::max(std::bit_cast<float>(low), least);
        num = kernels.collect(weights, num, start, std::bit_cast<float>(high), spare);
        if (num <= kFewWeights) return select_by_sorting<amount>(spare, num, above, wanted);
        const Buckets<amount> buckets(spare, num, low, high, shift);
        const int64_t bucket = buckets.find(wanted, above);
        if (bucket < 0) return 0.0f;
        low += static_cast<uint32_t>(bucket) << shift;
        high = low + (1u << shift);
        weights = spare;
    }
    return std::bit_cast<float>(low);
}

}  // namespace

float select(const Kernels& kernels, const float* weights, int64_t num, float least, Amount amount,
    double wanted, float* spare) {
    return amount == Amount::kOne
        ? select_by<Amount::kOne>(kernels, weights, num, least, wanted, spare)
        : select_by<Amount::kWeight>(kernels, weights, num, least, wanted, spare);
}

}  // namespace pdserve::sampling
