// Takes time in proportion to the tokens so far, not to the vocabulary, and keeps no state between
// steps.

#include "edits.h"

#include <limits>

namespace pdserve::sampling {

namespace {

template <class Body>
void for_known(const std::vector<int64_t>& ids, int64_t vocab_size, const Body& body) {
    for (const int64_t id : ids) {
        if (id >= 0 && id < vocab_size) body(id);
    }
}

void penalise_repetition(
    const Edits& edits, float* logits, int64_t vocab_size, int32_t* counts) {
    const auto penalise = [&](int64_t id) {
        if (counts[id]++ > 0) return;
        const float score = logits[id];
        logits[id] = score > 0.0f ? score / edits.repetition_penalty
                                  : score * edits.repetition_penalty;
    };
    for_known(edits.prompt, vocab_size, penalise);
    for_known(edits.output, vocab_size, penalise);
    const auto clear = [&](int64_t id) { counts[id] = 0; };
    for_known(edits.prompt, vocab_size, clear);
    for_known(edits.output, vocab_size, clear);
}

void penalise_output(const Edits& edits, float* logits, int64_t vocab_size, int32_t* counts) {
    for_known(edits.output, vocab_size, [&](int64_t id) { ++counts[id]; });
    for_known(edits.output, vocab_size, [&](int64_t id) {
        if (counts[id] == 0) return;
        const double by_count = edits.frequency_penalty * counts[id];
        logits[id] -= static_cast<float>(by_count + edits.presence_penalty);
        counts[id] = 0;
    });
}

}  // namespace

void apply(const Edits& edits, float* logits, int64_t vocab_size, int32_t* counts) {
    for_known(edits.forbidden, vocab_size,
        [&](int64_t id) { logits[id] = -std::numeric_limits<float>::infinity(); });
    for (const Bias& bias : edits.biases) {
        const bool is_known = bias.token_id >= 0 && bias.token_id < vocab_size;
        if (is_known) logits[bias.token_id] += bias.amount;
    }
    if (edits.repetition_penalty != 1.0f) penalise_repetition(edits, logits, vocab_size, counts);
    if (edits.frequency_penalty != 0.0 || edits.presence_penalty != 0.0) {
        penalise_output(edits, logits, vocab_size, counts);
    }
}

}  // namespace pdserve::sampling
