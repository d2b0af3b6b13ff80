#include "mixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../threads/thread_pool.h"

namespace pdserve::decoder {

using linear::Result;

namespace {

// Below this the work takes a few microseconds, and dividing it does not pay.
constexpr int64_t kElementsPerItem = 16 * 1024;

constexpr int64_t kTotals = 256;  // of a row at a time, in the L1 cache

// In float64, as weights of chosen experts: every machine rounds to the same float32.
float weight_of(float score) {
    return static_cast<float>(1.0 / (1.0 + std::exp(-double{score})));
}

// Calls body(row) for all rows, divided among the threads.
template <class Body>
void for_rows(int64_t num_rows, int64_t row_elements, const Body& body) {
    const int64_t at_once = std::max<int64_t>(1, kElementsPerItem / row_elements);
    ThreadPool::instance().parallel_for((num_rows + at_once - 1) / at_once, [&](int64_t item) {
        const int64_t end = std::min(num_rows, (item + 1) * at_once);
        for (int64_t row = item * at_once; row < end; ++row) body(row);
    });
}

}  // namespace

void Mixture::compute(const Experts& experts, const Buffers& buffers, int64_t num_rows,
    const Adapter* const* adapters) {
    const void* rows = buffers.normed;
    if (experts.has_shared()) share(experts, buffers, num_rows, adapters);
    products_.multiply(
        experts.router, rows, num_rows, Result::kStoreFloat, buffers.scores, 0, adapters);
    choice_.choose(experts, buffers.scores, num_rows);
    gather(buffers, num_rows);
    multiply(experts, &Mlp::gate_up, buffers, num_rows, adapters);
    multiply(experts, &Mlp::down, buffers, num_rows, adapters);
}

// Lets the shared expert compute all rows.
void Mixture::share(const Experts& experts, const Buffers& buffers, int64_t num_rows,
    const Adapter* const* adapters) {
    const void* rows = buffers.normed;
    if (experts.weighs_shared()) {
        products_.multiply(experts.shared_weight, rows, num_rows, Result::kStoreFloat,
            buffers.shared_scores, 0, adapters);
    }
    products_.multiply(experts.shared.gate_up, rows, num_rows, model_.arithmetic.gated,
        buffers.inner, 0, adapters);
    products_.multiply(experts.shared.down, buffers.inner, num_rows, Result::kStoreFloat,
        buffers.shared_rows, 0, adapters);
}

// Brings the rows of each expert together.
void Mixture::gather(const Buffers& buffers, int64_t num_rows) {
    const int64_t hidden = model_.sizes.hidden;
    const size_t row_bytes = hidden * (model_.is_bfloat16 ? 2 : 4);
    const auto* from = static_cast<const char*>(buffers.normed);
    auto* to = static_cast<char*>(buffers.expert_rows);
    for_rows(num_rows, hidden * choice_.num_chosen(), [&](int64_t row) {
        const ExpertChoice::Chosen* chosen = choice_.of(row);
        for (int64_t i = 0; i < choice_.num_chosen(); ++i) {
            std::memcpy(to + chosen[i].place * row_bytes, from + row * row_bytes, row_bytes);
        }
    });
}

// What adapters add to the products of all experts.
linear::Delta Mixture::adapt(const Experts& experts, linear::PackedMatrix Mlp::*matrix,
    const void* x, int64_t num_rows, const Adapter* const* adapters) {
    if (adapters == nullptr) return {};
    Deltas& deltas = products_.deltas();
    deltas.additions().assign(num_rows * choice_.num_chosen(), nullptr);
    for (int64_t row = 0; row < num_rows; ++row) {
        if (adapters[row] == nullptr) continue;
        const ExpertChoice::Chosen* chosen = choice_.of(row);
        for (int64_t i = 0; i < choice_.num_chosen(); ++i) {
            deltas.additions()[chosen[i].place] =
                adapters[row]->find(experts.mlps[chosen[i].expert].*matrix);
        }
    }
    return deltas.compute(x, (experts.mlps.front().*matrix).num_in);
}

// Multiplies the rows of all experts by their gate and up, or by their down, whose results take the
// place of the rows.
void Mixture::multiply(const Experts& experts, linear::PackedMatrix Mlp::*matrix,
    const Buffers& buffers, int64_t num_rows, const Adapter* const* adapters) {
    const bool reads_inner = matrix == &Mlp::down;
    const void* const all_x = reads_inner ? buffers.inner : buffers.expert_rows;
    const linear::Delta delta = adapt(experts, matrix, all_x, num_rows, adapters);
    each_.clear();
    for (int64_t e = 0; e < experts.count(); ++e) {
        const int64_t start = choice_.starts()[e], count = choice_.starts()[e + 1] - start;
        if (count == 0) continue;
        const linear::PackedMatrix& weights = experts.mlps[e].*matrix;
        const size_t element_bytes = model_.is_bfloat16 ? 2 : 4;
        const bool is_gated = weights.is_gated;
        auto* const x = static_cast<char*>(is_gated ? buffers.expert_rows : buffers.inner);
        auto* const out = static_cast<char*>(is_gated ? buffers.inner : buffers.expert_rows);
        const int64_t out_width = is_gated ? experts.inner() : weights.num_out;
        each_.push_back({
            .matrix = &weights,
            .x = x + start * weights.num_in * element_bytes,
            .is_bfloat16 = model_.is_bfloat16,
            .x_stride = weights.num_in,
            .num_rows = count,
            .result = is_gated ? model_.arithmetic.gated : Result::kStoreFloat,
            .out = out + start * out_width * (is_gated ? element_bytes : sizeof(float)),
            .out_stride = out_width,
            .delta = delta.expansions == nullptr
                ? linear::Delta{}
                : linear::Delta{delta.expansions + start, delta.inner + start},
        });
    }
    linear::multiply_all(each_.data(), each_.size(), variant_);
}

void Mixture::sum(const Experts& experts, const Buffers& buffers, int64_t first_row,
    int64_t num_rows, Result result, float* out) const {
    const int64_t hidden = model_.sizes.hidden, num_chosen = choice_.num_chosen();
    const auto* made = static_cast<const float*>(buffers.expert_rows);
    for_rows(num_rows, hidden * num_chosen, [&](int64_t row) {
        const ExpertChoice::Chosen* chosen = choice_.of(first_row + row);
        float* target = out + row * hidden;
        const float* shared = buffers.shared_rows + (first_row + row) * hidden;
        const float share = experts.weighs_shared()
            ? weight_of(buffers.shared_scores[first_row + row])
            : 1.0f;
        for (int64_t first = 0; first < hidden; first += kTotals, target += kTotals) {
            const int64_t count = std::min(kTotals, hidden - first);
            float totals[kTotals] = {};
            for (int64_t c = 0; c < num_chosen; ++c) {
                const float* from = made + chosen[c].place * hidden + first;
                for (int64_t i = 0; i < count; ++i) totals[i] += chosen[c].weight * from[i];
            }
            if (experts.has_shared()) {
                for (int64_t i = 0; i < count; ++i) totals[i] += share * shared[first + i];
            }
            if (result == Result::kAdd) {
                for (int64_t i = 0; i < count; ++i) target[i] += totals[i];
            } else {
                std::memcpy(target, totals, count * sizeof(float));
            }
        }
    });
}

}  // namespace pdserve::decoder
