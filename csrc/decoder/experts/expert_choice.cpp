// Weights are softmax values, computed in float64, so that every machine rounds to the same float32.

#include "expert_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../threads/thread_pool.h"

namespace pdserve::decoder {

namespace {

using Chosen = ExpertChoice::Chosen;

constexpr int64_t kRowsPerItem = 16;

// The `count` best, best first. Comparisons with NaN are false, so whatever the scores are, each
// expert is taken once at most.
void take_best(const float* scores, int64_t num_experts, int64_t count, Chosen* best) {
    int64_t num_taken = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
        int64_t place = num_taken;
        while (place > 0 && scores[e] > scores[best[place - 1].expert]) --place;
        if (place == count) continue;
        num_taken = std::min(num_taken + 1, count);
        std::move_backward(best + place, best + num_taken - 1, best + num_taken);
        best[place].expert = static_cast<int32_t>(e);
    }
}

float sigmoid(float score) {
    return static_cast<float>(1.0 / (1.0 + std::exp(-double{score})));
}

// All but the experts of the best groups become -infinity; of equal groups, the first is better.
void keep_best_groups(const Choice& choice, int64_t num_experts, float* scores) {
    constexpr float kLeast = -std::numeric_limits<float>::infinity();
    const int64_t size = num_experts / choice.num_groups;
    std::vector<float> sums(choice.num_groups);
    std::vector<Chosen> best(std::max(size, choice.num_groups));
    for (int64_t g = 0; g < choice.num_groups; ++g) {
        take_best(scores + g * size, size, choice.best_of_group, best.data());
        for (int64_t i = 0; i < choice.best_of_group; ++i) {
            sums[g] += scores[g * size + best[i].expert];
        }
    }
    take_best(sums.data(), choice.num_groups, choice.num_chosen_groups, best.data());
    std::vector<char> is_kept(choice.num_groups);
    for (int64_t i = 0; i < choice.num_chosen_groups; ++i) is_kept[best[i].expert] = 1;
    for (int64_t e = 0; e < num_experts; ++e) {
        if (!is_kept[e / size]) scores[e] = kLeast;
    }
}

// By what experts are compared: the scores themselves, or other numbers, in `memory`.
const float* compared(const Experts& experts, const float* scores, std::vector<float>& memory) {
    const Choice& choice = experts.choice;
    if (!choice.is_sigmoid && experts.score_bias == nullptr && choice.num_groups == 1) {
        return scores;
    }
    memory.resize(experts.count());
    for (int64_t e = 0; e < experts.count(); ++e) {
        memory[e] = choice.is_sigmoid ? sigmoid(scores[e]) : scores[e];
        if (experts.score_bias != nullptr) memory[e] += experts.score_bias[e];
    }
    if (choice.num_groups > 1) keep_best_groups(choice, experts.count(), memory.data());
    return memory.data();
}

void weigh_by_sigmoids(const Experts& experts, const float* scores, Chosen* best) {
    double sum = 1e-20;
    for (int64_t i = 0; i < experts.num_chosen; ++i) {
        best[i].weight = sigmoid(scores[best[i].expert]);
        sum += best[i].weight;
    }
    const double scale = experts.choice.weight_scale / (experts.normalizes_weights ? sum : 1.0);
    for (int64_t i = 0; i < experts.num_chosen; ++i) {
        best[i].weight = static_cast<float>(best[i].weight * scale);
    }
}

void weigh(const Experts& experts, const float* scores, Chosen* best) {
    if (experts.choice.is_sigmoid) return weigh_by_sigmoids(experts, scores, best);
    const float largest = scores[best[0].expert];
    const auto share = [&](int64_t e) { return std::exp(double{scores[e]} - double{largest}); };
    double sum = 0.0;
    if (experts.normalizes_weights) {
        for (int64_t i = 0; i < experts.num_chosen; ++i) sum += share(best[i].expert);
    } else {
        for (int64_t e = 0; e < experts.count(); ++e) sum += share(e);
    }
    const double scale = experts.choice.weight_scale;
    for (int64_t i = 0; i < experts.num_chosen; ++i) {
        best[i].weight = static_cast<float>(share(best[i].expert) / sum * scale);
    }
}

}  // namespace

void ExpertChoice::choose(const Experts& experts, const float* scores, int64_t num_rows) {
    const int64_t num_experts = experts.count();
    num_chosen_ = experts.num_chosen;
    chosen_.resize(num_rows * num_chosen_);
    const int64_t num_items = (num_rows + kRowsPerItem - 1) / kRowsPerItem;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t end = std::min(num_rows, (item + 1) * kRowsPerItem);
        std::vector<float> memory;
        for (int64_t row = item * kRowsPerItem; row < end; ++row) {
            Chosen* const best = chosen_.data() + row * num_chosen_;
            const float* numbers = compared(experts, scores + row * num_experts, memory);
            take_best(numbers, num_experts, num_chosen_, best);
            weigh(experts, scores + row * num_experts, best);
            std::sort(best, best + num_chosen_,
                [](const Chosen& a, const Chosen& b) { return a.expert < b.expert; });
        }
    });
    starts_.assign(num_experts + 1, 0);
    for (const Chosen& chosen : chosen_) ++starts_[chosen.expert + 1];
    for (int64_t e = 0; e < num_experts; ++e) starts_[e + 1] += starts_[e];
    next_ = starts_;
    for (Chosen& chosen : chosen_) chosen.place = next_[chosen.expert]++;
}

}  // namespace pdserve::decoder
