// Takes time in proportion to the edits, not to the vocabulary, and keeps no state between steps.

#include "edits.h"

#include <bit>
#include <limits>

namespace pdserve::sampling {

namespace {

// body(logit, i) for the i-th id.
template <class Body>
void for_known(Ids ids, float* logits, int64_t vocab_size, const Body& body) {
    for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] >= 0 && ids[i] < vocab_size) body(logits[ids[i]], i);
    }
}

}  // namespace

void apply(const Edits& edits, float* logits, int64_t vocab_size) {
    for_known(edits.forbidden, logits, vocab_size,
        [](float& logit, size_t) { logit = -std::numeric_limits<float>::infinity(); });
    for_known(edits.biased, logits, vocab_size,
        [&](float& logit, size_t i) { logit += edits.biases[i]; });
    const float penalty = edits.repetition_penalty;
    for_known(edits.seen, logits, vocab_size, [&](float& logit, size_t) {
        // By bits, since compilers make a branch otherwise, which is mispredicted half of the time.
        const auto less = std::bit_cast<uint32_t>(logit / penalty);
        const auto more = std::bit_cast<uint32_t>(logit * penalty);
        const auto is_above = -static_cast<uint32_t>(logit > 0.0f);
        logit = std::bit_cast<float>((less & is_above) | (more & ~is_above));
    });
    for_known(edits.output, logits, vocab_size,
        [&](float& logit, size_t i) { logit -= edits.penalties[i]; });
}

}  // namespace pdserve::sampling
