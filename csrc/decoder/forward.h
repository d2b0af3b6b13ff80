// One step of the model: every layer, in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "../attention/layer.h"
#include "../isa/cpu.h"
#include "../ranks/group.h"
#include "../scratch_buffer.h"
#include "buffers.h"
#include "experts/mixture.h"
#include "latent_mixer.h"
#include "model.h"
#include "products.h"
#include "recurrent_mixer.h"
#include "step/companions.h"
#include "step/inputs.h"
#include "step/kept_rows.h"

namespace pdserve::decoder {

// Called with the number of completed layers whenever the keys and values of a layer have been
// written, by all ranks.
using Written = std::function<void(int64_t num_layers)>;

// Computes steps, one at a time. Its working memory is kept between steps.
class Forward {
public:
    // `group`: the other ranks, which compute the same steps with their shares of the model; null:
    // there are none.
    Forward(const Model& model, Variant variant, ranks::Group* group);

    // A row of logits or states depends, bit for bit, only on that row and its request's KV.
    // Throws ranks::RanksLost.
    void run(const Inputs& inputs, const Written& written);

    size_t workspace_bytes() const { return memory_.num_bytes(); }

private:
    // Writes rows [first_row, first_row + num_rows) to `out`, or adds them to what is there.
    using MakeRows = std::function<void(
        int64_t first_row, int64_t num_rows, linear::Result result, float* out)>;

    struct WindowPlan {
        int sliding_window;
        attention::Plan plan;
    };

    void compute_with_others(const Inputs& inputs, const Written& written);
    void compute_parts(const Inputs& inputs, const Written& written);
    void compute(const Inputs& inputs, const Written& written);
    void begin(const int64_t* token_ids);
    void look_up(const int64_t* token_ids);
    void adapt_embedding(const int64_t* token_ids);
    void adapt_rows(const Inputs& inputs);
    void replace_logits(float* logits);
    void replace_trained(
        const TrainedTokens& trained, const void* x, int64_t num_rows, float* logits);
    const Adapter* const* adapters(int64_t first_row = 0) const {
        return adapters_.empty() ? nullptr : adapters_.data() + first_row;
    }
    void look_up_rows(const int64_t* ids, int64_t count, float* out);
    void make_plans(const attention::RowChoice& kept);
    attention::Plan& plan_of(const Layer& layer);
    void write_kv(const Layer& layer, Companions::Place place);
    const float* measure_heads(const attention::QkvRows& rows);
    void attend(const Layer& layer, Companions::Place place, attention::Plan& plan);
    void keep_rows(const attention::RowChoice& rows, int64_t attended_width = 0);
    int64_t attended_width(const Layer& layer) const;
    void finish_attention(const Layer& layer);
    void finish_layer(const Layer& layer);
    void copy_taps(const Inputs& inputs, int64_t layer) const;
    void mix_experts(const Layer& layer);
    void compute_states(const std::vector<int64_t>& rows, float* out);
    void compute_logits(float* logits);
    void normalise(const float* weight, float scale = 1.0f);
    void add_product(
        const linear::PackedMatrix& matrix, const void* x, const float* after_norm);
    void add_rows(const MakeRows& make, const float* after_norm);

    const Model& model_;
    const Variant variant_;
    ranks::Group* const group_;         // null: no other ranks
    ranks::TensorRanks* const tensor_;  // that compute the same layers; null: none
    const size_t element_bytes_;
    ScratchBuffer memory_;
    const Products products_;
    Mixture mixture_;
    LatentMixer latent_;
    RecurrentMixer recurrent_;
    std::vector<WindowPlan> plans_;  // one for each sliding window that the model has
    attention::Plan last_plan_;      // of the last layer: only the rows that are kept

    // Only valid while a step is running.
    Buffers buffers_;
    attention::Step step_;
    attention::Pool pool_;
    recurrent::States states_;
    Companions companions_;
    std::vector<const Adapter*> adapters_;  // of each row, or null; none: no row has one
    std::vector<float> trained_logits_;     // of a row of those, before they are put in place
    int64_t num_rows_ = 0;  // that are still needed
};

}  // namespace pdserve::decoder
