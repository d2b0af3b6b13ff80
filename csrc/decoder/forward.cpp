// The residual stream is float32 throughout; only the inputs of products and of attention are
// rounded to the model's type. In the last layer, all rows need keys and values; the rest is
// computed only for rows that are sampled or whose states are needed.

#include "forward.h"

#include <algorithm>
#include <cstring>

#include "../linear/codes.h"
#include "../ranks/slot.h"
#include "../rows/launch.h"
#include "../threads/thread_pool.h"
#include "step/part.h"
#include "step/positions.h"

namespace pdserve::decoder {

using linear::Result;

Forward::Forward(const Model& model, Variant variant, ranks::Group* group)
    : model_(model),
      variant_(variant),
      group_(group),
      tensor_(group == nullptr || group->tensor().is_alone() ? nullptr : &group->tensor()),
      element_bytes_(model.is_bfloat16 ? 2 : 4),
      products_(model.is_bfloat16, variant),
      mixture_(model, variant),
      latent_(model, variant),
      recurrent_(model, variant),
      buffers_(nullptr, model.sizes, 0, element_bytes_),
      step_{},
      pool_{},
      states_{} {
    for (const Layer& layer : model.layers) {
        if (layer.is_recurrent()) continue;
        bool is_new = true;
        for (const WindowPlan& known : plans_) {
            is_new = is_new && known.sliding_window != layer.sliding_window;
        }
        if (is_new) plans_.push_back({layer.sliding_window, {}});
    }
}

// A rank that fails in the middle of a step would be waited for.
void Forward::run(const Inputs& inputs, const Written& written) {
    if (group_ == nullptr) return compute(inputs, written);
    try {
        compute_with_others(inputs, written);
    } catch (...) {
        group_->give_up();
        throw;
    }
}

void Forward::compute_with_others(const Inputs& inputs, const Written& written) {
    const bool is_leader = group_->rank() == 0;
    if (is_leader) group_->begin_step();
    if (!model_.is_first_stage() && group_->tensor().is_first()) {
        compute_parts(inputs, [&](int64_t num_layers) { group_->tell_layers(num_layers); });
    } else {
        compute_parts(inputs, written);
    }
    if (is_leader && written) {
        const auto own = static_cast<int64_t>(model_.layers.size());
        group_->follow_layers(own, model_.sizes.pool_layers, written);
    }
    group_->end_step();  // the logits are complete, and nobody reads the inputs any more
}

// Keys and values of a layer are written when those of the last part are.
void Forward::compute_parts(const Inputs& inputs, const Written& written) {
    if (!group_->has_stages()) return compute(inputs, written);
    const int64_t most = ranks::rows_of_part(model_.sizes.hidden);
    const int64_t num_tokens = inputs.step.num_tokens;
    for (int64_t first = 0; first < num_tokens; first += most) {
        const int64_t end = std::min(num_tokens, first + most);
        const Part part(inputs, first, end, model_.sizes);
        compute(part.inputs(), end == num_tokens ? written : Written());
    }
}

void Forward::compute(const Inputs& inputs, const Written& written) {
    const ThreadPool::Region region(ThreadPool::instance());
    num_rows_ = inputs.step.num_tokens;
    const size_t num_bytes = Buffers(nullptr, model_.sizes, num_rows_, element_bytes_).num_bytes;
    buffers_ = Buffers(memory_.at_least(num_bytes), model_.sizes, num_rows_, element_bytes_);
    step_ = inputs.step;
    step_.slots = buffers_.slots;
    pool_ = inputs.pool;
    states_ = inputs.states_of_layers;
    locate(step_, pool_.block_size, buffers_.slots);
    companions_.lay_out(model_, inputs, step_);
    turn(model_, inputs.positions, num_rows_, buffers_.cos_sin);
    const KeptRows kept(inputs.sampled, inputs.states);
    make_plans(kept.all());
    adapt_rows(inputs);
    begin(inputs.token_ids);

    const int first = static_cast<int>(model_.sizes.first_layer);
    for (const Layer& layer : model_.layers) {
        const int number = static_cast<int>(&layer - model_.layers.data());
        const int index = first + layer.pool_index;
        const bool is_last = model_.is_last_stage() && &layer == &model_.layers.back();
        const int num_written = index + !layer.is_recurrent();
        copy_taps(inputs, first + number);
        const Companions::Place place = companions_.of(number, index);
        write_kv(layer, place);
        if (written && tensor_ == nullptr) written(num_written);
        if (is_last && kept.all().num_rows == 0) {
            if (tensor_ != nullptr) tensor_->meet();
            if (written && tensor_ != nullptr) written(num_written);
            return;
        }
        if (!layer.is_recurrent()) attend(layer, place, is_last ? last_plan_ : plan_of(layer));
        if (is_last) keep_rows(kept.all(), attended_width(layer));
        finish_attention(layer);
        if (written && tensor_ != nullptr) written(num_written);  // all ranks have met
        finish_layer(layer);
    }
    if (!model_.is_last_stage()) {
        if (!group_->tensor().is_first()) return;
        return group_->next()->give(buffers_.hidden, num_rows_ * model_.sizes.hidden);
    }
    if (tensor_ == nullptr || tensor_->is_first()) {
        compute_states(kept.states(), inputs.states_out);
    }
    if (kept.is_mixed()) keep_rows(kept.sampled());
    if (num_rows_ > 0) compute_logits(inputs.logits);
}

// Before a layer there are all rows: only the last one keeps some, after its attention. All ranks of
// a stage have them.
void Forward::copy_taps(const Inputs& inputs, int64_t layer) const {
    if (tensor_ != nullptr && !tensor_->is_first()) return;
    const int64_t hidden = model_.sizes.hidden;
    for (int64_t tap = 0; tap < inputs.num_taps; ++tap) {
        if (inputs.taps[tap] != layer) continue;
        for (int64_t row = 0; row < inputs.sampled.num_rows; ++row) {
            std::memcpy(inputs.taps_out + (row * inputs.num_taps + tap) * hidden,
                buffers_.hidden + inputs.sampled.rows[row] * hidden, hidden * sizeof(float));
        }
    }
}

void Forward::begin(const int64_t* token_ids) {
    if (model_.is_first_stage()) {
        look_up(token_ids);
        return adapt_embedding(token_ids);
    }
    group_->before()->take(buffers_.hidden, num_rows_ * model_.sizes.hidden);
}

// Says which rows have which adapter.
void Forward::adapt_rows(const Inputs& inputs) {
    adapters_.clear();
    if (inputs.adapters == nullptr) return;
    const attention::Step& step = inputs.step;
    adapters_.resize(step.num_tokens);
    for (int64_t r = 0; r < step.num_requests; ++r) {
        const int64_t first = step.query_start[r], end = step.query_start[r + 1];
        const int64_t position = step.context_lens[r] - (end - first);
        const int64_t before = std::clamp<int64_t>(inputs.adapted_from[r] - position, 0, end - first);
        std::fill(adapters_.begin() + first + before, adapters_.begin() + end, inputs.adapters[r]);
    }
}

// Rows of adapters that have an embedding of their own, or add to the model's.
void Forward::adapt_embedding(const int64_t* token_ids) {
    const float scale = model_.arithmetic.embedding_scale;
    const int64_t size = model_.sizes.hidden;
    for (int64_t row = 0; row < static_cast<int64_t>(adapters_.size()); ++row) {
        const Adapter* const own = adapters_[row];
        if (own == nullptr) continue;
        float* const out = buffers_.hidden + row * size;
        const auto trained = own->trained.rows.find(token_ids[row]);
        if (trained != own->trained.rows.end()) {
            rows::look_up({own->trained.embedding, &trained->second, size, scale, out}, 1,
                model_.is_bfloat16, variant_);
        } else if (own->embedding != nullptr) {
            rows::look_up({own->embedding, token_ids + row, size, scale, out}, 1,
                model_.is_bfloat16, variant_);
        } else if (own->embedding_a != nullptr) {
            const linear::PackedMatrix& b = own->embedding_b;
            const auto* const a = static_cast<const char*>(own->embedding_a)
                + token_ids[row] * b.num_in * element_bytes_;
            products_.multiply(b, a, 1, Result::kAdd, out);
        }
    }
}

// A rank has a share of the vocabulary. Its part of the sum is zeros for other tokens.
void Forward::look_up(const int64_t* token_ids) {
    const Sizes& sizes = model_.sizes;
    if (tensor_ == nullptr) {
        return look_up_rows(token_ids, num_rows_, buffers_.hidden);
    }
    const int64_t at_once = ranks::rows_at_once(sizes.hidden);
    for (int64_t first = 0; first < num_rows_; first += at_once) {
        const int64_t count = std::min(at_once, num_rows_ - first);
        float* part = tensor_->part();
        std::memset(part, 0, count * sizes.hidden * sizeof(float));
        for (int64_t row = 0; row < count; ++row) {
            const int64_t id = token_ids[first + row] - sizes.first_token_id;
            if (id < 0 || id >= sizes.num_token_ids) continue;
            look_up_rows(&id, 1, part + row * sizes.hidden);
        }
        tensor_->sum(buffers_.hidden + first * sizes.hidden, count, sizes.hidden, false);
    }
}

// Of the tokens that this rank has.
void Forward::look_up_rows(const int64_t* ids, int64_t count, float* out) {
    const float scale = model_.arithmetic.embedding_scale;
    if (model_.embedding == nullptr) {
        return linear::look_up(
            {&model_.coded_embedding, ids, model_.is_bfloat16, scale, out}, count);
    }
    rows::look_up({model_.embedding, ids, model_.sizes.hidden, scale, out}, count,
        model_.is_bfloat16, variant_);
}

void Forward::make_plans(const attention::RowChoice& kept) {
    const int num_heads = static_cast<int>(model_.sizes.num_heads);
    for (WindowPlan& window : plans_) {
        window.plan.make(step_, pool_, num_heads, window.sliding_window);
    }
    if (kept.num_rows == 0 || !model_.is_last_stage()) return;
    if (model_.layers.back().is_recurrent()) return;
    const int last_window = model_.layers.back().sliding_window;
    last_plan_.make(step_, pool_, num_heads, last_window, kept);
}

attention::Plan& Forward::plan_of(const Layer& layer) {
    size_t i = 0;
    while (plans_[i].sliding_window != layer.sliding_window) ++i;
    return plans_[i].plan;
}

void Forward::write_kv(const Layer& layer, Companions::Place place) {
    normalise(layer.attention_norm);
    if (layer.is_recurrent()) return recurrent_.mix(layer, step_, states_, buffers_);
    if (model_.sizes.is_latent()) {
        return latent_.write(*place.step, pool_, place.index, layer, buffers_, adapters());
    }
    products_.multiply(
        layer.qkv, buffers_.normed, num_rows_, Result::kStore, buffers_.qkv, 0, adapters());
    attention::QkvRows rows{
        .qkv = buffers_.qkv,
        .is_bfloat16 = model_.is_bfloat16,
        .stride = model_.sizes.row_width(),
        .num_heads = static_cast<int>(model_.sizes.num_heads),
        .q_norm = layer.q_norm,
        .k_norm = layer.k_norm,
        .norms_together = model_.sizes.norms_heads_together,
        .norm_eps = model_.norm_eps,
        .cos_sin = buffers_.cos_sin + layer.rope * num_rows_ * model_.sizes.head_dim,
    };
    if (rows.norms_together && rows.q_norm != nullptr && tensor_ != nullptr) {
        rows.mean_squares = measure_heads(rows);
    }
    attention::rotate_and_write(*place.step, pool_, place.index, rows, variant_);
}

// The mean squares of all ranks' heads. All have equally many queries, and equally many keys; keys
// that several have are all so equally often.
const float* Forward::measure_heads(const attention::QkvRows& rows) {
    const Sizes& sizes = model_.sizes;
    const int64_t at_once = ranks::rows_at_once(2);
    float* const means = buffers_.mean_squares;
    for (int64_t first = 0; first < num_rows_; first += at_once) {
        const int64_t count = std::min(at_once, num_rows_ - first);
        attention::measure_heads(rows, static_cast<int>(sizes.num_kv_heads),
            static_cast<int>(sizes.head_dim), first, count, tensor_->part());
        tensor_->sum(means + 2 * first, count, 2, false);
    }
    const auto num_ranks = static_cast<float>(tensor_->count());
    for (int64_t i = 0; i < 2 * num_rows_; ++i) means[i] /= num_ranks;
    return means;
}

void Forward::attend(const Layer& layer, Companions::Place place, attention::Plan& plan) {
    const attention::QueryRows query{
        buffers_.qkv, model_.sizes.row_width(), model_.sizes.head_dim, model_.is_bfloat16};
    const attention::Scoring scoring{
        model_.arithmetic.attention_scale, model_.arithmetic.attention_cap, layer.sinks};
    attention::attend(plan, *place.step, place.index, query, buffers_.attended, scoring, variant_);
    if (model_.sizes.gates_attention) {
        const Sizes& sizes = model_.sizes;
        const auto* const gates =
            static_cast<const char*>(buffers_.qkv) + sizes.qkv_width() * element_bytes_;
        rows::weigh({gates, sizes.row_width(), buffers_.attended, sizes.query_width()}, num_rows_,
            model_.is_bfloat16, variant_);
    }
}

int64_t Forward::attended_width(const Layer& layer) const {
    return layer.is_recurrent() ? model_.sizes.state_values() : model_.sizes.query_width();
}

// Moves these rows, which are ascending, to the front of the buffers that the rest of the layer
// reads.
void Forward::keep_rows(const attention::RowChoice& rows, int64_t attended_width) {
    const size_t hidden_bytes = model_.sizes.hidden * sizeof(float);
    const size_t normed_bytes = model_.sizes.hidden * element_bytes_;
    const size_t attended_bytes = attended_width * element_bytes_;
    const auto move = [](void* data, size_t row_bytes, int64_t to, int64_t from) {
        char* rows_data = static_cast<char*>(data);
        std::memmove(rows_data + to * row_bytes, rows_data + from * row_bytes, row_bytes);
    };
    for (int64_t i = 0; i < rows.num_rows; ++i) {
        if (rows.rows[i] == i) continue;
        if (!adapters_.empty()) adapters_[i] = adapters_[rows.rows[i]];
        move(buffers_.hidden, hidden_bytes, i, rows.rows[i]);
        move(buffers_.attended, attended_bytes, i, rows.rows[i]);
        if (model_.arithmetic.is_parallel) {
            move(buffers_.normed, normed_bytes, i, rows.rows[i]);
        }
    }
    num_rows_ = rows.num_rows;
}

void Forward::finish_attention(const Layer& layer) {
    const void* values = buffers_.attended;
    if (model_.sizes.is_latent() && !layer.is_recurrent()) {
        latent_.make_values(layer, buffers_, num_rows_, adapters());
        values = buffers_.head_rows;
    }
    add_product(layer.attention_out, values, layer.after_attention_norm);
}

void Forward::finish_layer(const Layer& layer) {
    if (!model_.arithmetic.is_parallel) normalise(layer.mlp_norm);
    if (layer.has_experts()) return mix_experts(layer);
    products_.multiply(layer.mlp.gate_up, buffers_.normed, num_rows_, model_.arithmetic.gated,
        buffers_.inner, 0, adapters());
    add_product(layer.mlp.down, buffers_.inner, layer.after_mlp_norm);
}

void Forward::mix_experts(const Layer& layer) {
    mixture_.compute(layer.experts, buffers_, num_rows_, adapters());
    const auto sum = [&](int64_t first, int64_t count, Result result, float* out) {
        mixture_.sum(layer.experts, buffers_, first, count, result, out);
    };
    add_rows(sum, layer.after_mlp_norm);
}

// Not rounded to the model's type, since they are not the input of a product.
void Forward::compute_states(const std::vector<int64_t>& rows, float* out) {
    const int64_t size = model_.sizes.hidden;
    for (size_t first = 0, end = 0; first < rows.size(); first = end) {
        end = first + 1;
        while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
        const float* run = buffers_.hidden + rows[first] * size;
        rows::normalise({run, model_.final_norm, model_.norm_eps, size, out + first * size, 1.0f,
                            model_.arithmetic.centres_norms},
            static_cast<int64_t>(end - first), false, variant_);
    }
}

void Forward::compute_logits(float* logits) {
    normalise(model_.final_norm, model_.arithmetic.logit_scale);
    products_.multiply(model_.lm_head, buffers_.normed, num_rows_, Result::kStoreFloat,
        logits + model_.sizes.first_token_id, model_.sizes.vocab, adapters());
    replace_logits(logits);
    const float cap = model_.arithmetic.logit_cap;
    if (cap == 0) return;
    rows::cap({logits + model_.sizes.first_token_id, model_.sizes.vocab,
        model_.sizes.num_token_ids, cap}, num_rows_, variant_);
}

// Those of rows whose adapters have an output matrix of their own, or rows of it.
void Forward::replace_logits(float* logits) {
    const Sizes& sizes = model_.sizes;
    for (int64_t row = 0, end = 0; row < num_rows_ && !adapters_.empty(); row = end) {
        const Adapter* const own = adapters_[row];
        end = row + 1;
        if (own == nullptr) continue;
        while (end < num_rows_ && adapters_[end] == own) ++end;
        const auto* const x =
            static_cast<const char*>(buffers_.normed) + row * sizes.hidden * element_bytes_;
        float* const out = logits + row * sizes.vocab;
        if (own->lm_head.weights != nullptr) {
            products_.multiply(own->lm_head, x, end - row, Result::kStoreFloat,
                out + sizes.first_token_id, sizes.vocab);
        }
        replace_trained(own->trained, x, end - row, out);
    }
}

void Forward::replace_trained(
    const TrainedTokens& trained, const void* x, int64_t num_rows, float* logits) {
    const auto count = static_cast<int64_t>(trained.head_ids.size());
    if (count == 0) return;
    trained_logits_.resize(num_rows * count);
    products_.multiply(trained.head, x, num_rows, Result::kStoreFloat, trained_logits_.data());
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t i = 0; i < count; ++i) {
            logits[row * model_.sizes.vocab + trained.head_ids[i]] = trained_logits_[row * count + i];
        }
    }
}

// Without a weight, rows are only rounded.
void Forward::normalise(const float* weight, float scale) {
    const rows::Norm norm{buffers_.hidden, weight, model_.norm_eps, model_.sizes.hidden,
        buffers_.normed, scale, model_.arithmetic.centres_norms};
    const auto run = weight == nullptr ? rows::round_rows : rows::normalise;
    run(norm, num_rows_, model_.is_bfloat16, variant_);
}

// Adds a product to the residual stream.
void Forward::add_product(
    const linear::PackedMatrix& matrix, const void* x, const float* after_norm) {
    const size_t row_bytes = matrix.num_in * element_bytes_;
    const auto make = [&](int64_t first, int64_t count, Result result, float* out) {
        const void* rows = static_cast<const char*>(x) + first * row_bytes;
        products_.multiply(matrix, rows, count, result, out, 0, adapters(first));
    };
    add_rows(make, after_norm);
}

// Adds rows to the residual stream. Each rank has a share of the inputs of what makes them, so they
// are the sum of those of all ranks; with a norm, the sum is normalised.
void Forward::add_rows(const MakeRows& make, const float* after_norm) {
    const bool adds = after_norm == nullptr;
    const int64_t width = model_.sizes.hidden;
    float* const target = adds ? buffers_.hidden : buffers_.made;
    if (tensor_ == nullptr) {
        make(0, num_rows_, adds ? Result::kAdd : Result::kStoreFloat, target);
    } else {
        const int64_t at_once = ranks::rows_at_once(width);
        for (int64_t first = 0; first < num_rows_; first += at_once) {
            const int64_t count = std::min(at_once, num_rows_ - first);
            make(first, count, Result::kStoreFloat, tensor_->part());
            tensor_->sum(target + first * width, count, width, adds);
        }
    }
    if (adds) return;
    rows::add_normalised({target, after_norm, model_.norm_eps, width, buffers_.hidden, 1.0f,
                             model_.arithmetic.centres_norms},
        num_rows_, variant_);
}

}  // namespace pdserve::decoder
