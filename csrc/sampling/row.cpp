// Applies the mask and the edits. Greedy: takes the likeliest token. Otherwise: weights at the
// temperature, min-p, top-k, top-p, then the inverse CDF of one random number. All sums are exact
// (kWeightUnit), so the token does not depend on the order of summation.

#include "row.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "philox.h"
#include "select.h"

namespace pdserve::sampling {

namespace {

constexpr double kLog2E = 1.4426950408889634;

// The k-th largest weight, or 0 if fewer are above 0.
float kth_largest(int64_t k, int64_t vocab_size, const Kernels& kernels, Workspace& workspace) {
    float* maxima = workspace.spare;
    const int64_t num_blocks = (vocab_size + kSmallBlock - 1) / kSmallBlock;
    float least = 0.0f;
    if (k <= num_blocks) {
        // At least this many blocks contain such a weight or a larger one.
        kernels.block_maxima(workspace.weights, vocab_size, maxima);
        std::nth_element(maxima, maxima + k - 1, maxima + num_blocks, std::greater<float>());
        least = maxima[k - 1];
    }
    return select(kernels, workspace.weights, vocab_size, least, Amount::kOne,
        static_cast<double>(k), workspace.spare);
}

// The smallest weight among the fewest, likeliest tokens whose weights sum to `top_p` of all
// weights from `floor` up.
float nucleus(double top_p, float floor, int64_t vocab_size, const Kernels& kernels,
    Workspace& workspace) {
    const float* weights = workspace.weights;
    const double kept = kernels.sum(weights, vocab_size, floor, workspace.block_sums);
    const double wanted = std::max(top_p * kept, kWeightUnit);
    // The tokens below this weigh less in total than what may be dropped.
    const double expendable = 0.99 * (kept - wanted) / static_cast<double>(vocab_size);
    const float least = std::max(floor, static_cast<float>(expendable));
    return select(
        kernels, weights, vocab_size, least, Amount::kWeight, wanted, workspace.spare);
}

// The smallest weight that passes the filters. Equal weights are kept or dropped together.
float floor_of(const RowParams& params, int64_t vocab_size, const Kernels& kernels,
    Workspace& workspace) {
    float floor = static_cast<float>(params.min_p);
    if (params.top_k > 0 && params.top_k < vocab_size) {
        floor = std::max(floor, kth_largest(params.top_k, vocab_size, kernels, workspace));
    }
    if (params.top_p < 1.0) {
        floor = std::max(floor, nucleus(params.top_p, floor, vocab_size, kernels, workspace));
    }
    return floor;
}

// The first token at which the running sum of the weights from `floor` up exceeds the target.
int64_t locate(const Workspace& workspace, float floor, double target) {
    double sum = 0.0;
    int64_t block = 0;
    while (sum + workspace.block_sums[block] <= target) sum += workspace.block_sums[block++];
    int64_t id = block * kBlock;
    while (true) {
        const float weight = workspace.weights[id];
        if (weight >= floor) sum += weight;
        if (sum > target) return id;
        ++id;
    }
}

int64_t draw(const RowParams& params, const float* logits, int64_t vocab_size, float peak,
    const Kernels& kernels, Workspace& workspace) {
    // Limits the factor: if it were infinite, the 0 of the peak would become NaN; it must not be
    // subnormal either.
    constexpr double kLeast = std::numeric_limits<float>::min();
    constexpr double kMost = std::numeric_limits<float>::max();
    const auto scale = static_cast<float>(std::clamp(kLog2E / params.temperature, kLeast, kMost));
    kernels.weigh(logits, vocab_size, peak, scale, workspace.weights);
    const float floor = floor_of(params, vocab_size, kernels, workspace);
    const double total = kernels.sum(
        workspace.weights, vocab_size, floor, workspace.block_sums);
    const double target = uniform(params.seed, params.position) * total;  // less than the total
    return locate(workspace, floor, target);
}

// Log-probabilities of the model's own distribution: before edits, at temperature 1.
void add_logprobs(const Row& row, const Kernels& kernels, Choice& choice) {
    const float peak = kernels.peak_of(row.logits, row.vocab_size).logit;
    const double log_sum = std::log(kernels.exp_sum(row.logits, row.vocab_size, peak));
    const auto logprob_of = [&](float logit) {
        return static_cast<float>(static_cast<double>(logit) - peak - log_sum);
    };
    choice.logprob = logprob_of(row.logits[choice.token_id]);
    const int64_t num_top = std::min(row.params.num_logprobs, row.vocab_size);
    if (num_top == 0) return;
    choice.top_ids.resize(num_top);
    choice.top_logprobs.resize(num_top);
    kernels.rank(row.logits, row.vocab_size, static_cast<int>(num_top),
        choice.top_logprobs.data(), choice.top_ids.data());
    for (float& value : choice.top_logprobs) value = logprob_of(value);
}

}  // namespace

void Workspace::reserve(int64_t vocab_size) {
    const size_t size = padded_size(vocab_size), num_blocks = size / kBlock;
    block_sums = memory_.of<double>(num_blocks + (3 * size + 16) / 2);  // two floats are as large
    logits = reinterpret_cast<float*>(block_sums + num_blocks);
    weights = logits + size;
    spare = weights + size;
}

Choice choose(const Row& row, const Kernels& kernels, Workspace& workspace) {
    workspace.reserve(row.vocab_size);
    const float* logits = row.logits;
    if (row.mask != nullptr || row.edits != nullptr) {
        float* changed = workspace.logits;
        if (row.mask != nullptr) {
            kernels.mask(logits, row.vocab_size, row.mask, changed);
        } else {
            std::copy_n(logits, row.vocab_size, changed);
        }
        if (row.edits != nullptr) {
            apply(*row.edits, changed, row.vocab_size);
        }
        logits = changed;
    }
    Choice choice;
    const Peak peak = kernels.peak_of(logits, row.vocab_size);
    if (!std::isfinite(peak.logit)) return choice;
    choice.token_id = row.params.temperature == 0.0
        ? peak.token_id
        : draw(row.params, logits, row.vocab_size, peak.logit, kernels, workspace);
    if (row.params.num_logprobs >= 0) add_logprobs(row, kernels, choice);
    return choice;
}

}  // namespace pdserve::sampling
