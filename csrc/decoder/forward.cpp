// The residual stream is float32 throughout; only the inputs of products and of attention are
// rounded to the model's type. In the last layer, all rows need keys and values; the rest is
// computed only for rows that are sampled or whose states are needed.

#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../rows/launch.h"
#include "../thread_pool.h"
#include "positions.h"

namespace pdserve::decoder {

using linear::Result;

Forward::Forward(const Model& model, Variant variant, ranks::Group* group)
    : model_(model),
      variant_(variant),
      group_(group),
      element_bytes_(model.is_bfloat16 ? 2 : 4),
      buffers_(nullptr, model.sizes, 0, element_bytes_),
      step_{},
      pool_{} {
    for (const Layer& layer : model.layers) {
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
        if (group_->rank() == 0) group_->begin_step();
        compute(inputs, written);
        group_->meet();  // the logits are complete, and nobody reads the inputs any more
    } catch (...) {
        group_->give_up();
        throw;
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
    locate(step_, pool_.block_size, buffers_.positions, buffers_.slots);
    turn(model_, buffers_.positions, num_rows_, buffers_.cos_sin);
    const KeptRows kept(inputs.sampled, inputs.states);
    make_plans(kept.all());
    look_up(inputs.token_ids);

    const int last = static_cast<int>(model_.layers.size()) - 1;
    for (int index = 0; index <= last; ++index) {
        const Layer& layer = model_.layers[index];
        write_kv(layer, index);
        if (written && group_ == nullptr) written(index + 1);
        if (index == last && kept.all().num_rows == 0) {
            if (group_ != nullptr) group_->meet();
            if (written && group_ != nullptr) written(index + 1);
            return;
        }
        attend(index, index == last ? last_plan_ : plan_of(layer));
        if (index == last) keep_rows(kept.all());
        finish_attention(layer);
        if (written && group_ != nullptr) written(index + 1);  // all ranks have met
        finish_layer(layer);
    }
    compute_states(kept.states(), inputs.states_out);
    if (kept.is_mixed()) keep_rows(kept.sampled());
    if (num_rows_ > 0) compute_logits(inputs.logits);
}

// A rank has a share of the vocabulary. Its part of the sum is zeros for other tokens.
void Forward::look_up(const int64_t* token_ids) {
    const Sizes& sizes = model_.sizes;
    if (group_ == nullptr) {
        rows::look_up({model_.embedding, token_ids, sizes.hidden, buffers_.hidden}, num_rows_,
            model_.is_bfloat16, variant_);
        return;
    }
    const int64_t at_once = group_->rows_at_once(sizes.hidden);
    for (int64_t first = 0; first < num_rows_; first += at_once) {
        const int64_t count = std::min(at_once, num_rows_ - first);
        float* part = group_->part();
        std::memset(part, 0, count * sizes.hidden * sizeof(float));
        for (int64_t row = 0; row < count; ++row) {
            const int64_t id = token_ids[first + row] - sizes.first_token_id;
            if (id < 0 || id >= sizes.num_token_ids) continue;
            rows::look_up({model_.embedding, &id, sizes.hidden, part + row * sizes.hidden}, 1,
                model_.is_bfloat16, variant_);
        }
        group_->sum(buffers_.hidden + first * sizes.hidden, count, sizes.hidden, false);
    }
}

void Forward::make_plans(const attention::RowChoice& kept) {
    const int num_heads = static_cast<int>(model_.sizes.num_heads);
    for (WindowPlan& window : plans_) {
        window.plan.make(step_, pool_, num_heads, window.sliding_window);
    }
    if (kept.num_rows == 0) return;
    const int last_window = model_.layers.back().sliding_window;
    last_plan_.make(step_, pool_, num_heads, last_window, kept);
}

attention::Plan& Forward::plan_of(const Layer& layer) {
    size_t i = 0;
    while (plans_[i].sliding_window != layer.sliding_window) ++i;
    return plans_[i].plan;
}

void Forward::write_kv(const Layer& layer, int index) {
    normalise(layer.attention_norm);
    multiply(layer.qkv, buffers_.normed, num_rows_, Result::kStore, buffers_.qkv,
        layer.qkv.num_out);
    const attention::QkvRows rows{
        .qkv = buffers_.qkv,
        .stride = model_.sizes.qkv_width(),
        .num_heads = static_cast<int>(model_.sizes.num_heads),
        .q_norm = layer.q_norm,
        .k_norm = layer.k_norm,
        .norm_eps = model_.norm_eps,
        .cos_sin = buffers_.cos_sin,
    };
    attention::rotate_and_write(step_, pool_, index, rows, variant_);
}

void Forward::attend(int index, attention::Plan& plan) {
    const attention::QueryRows query{
        buffers_.qkv, model_.sizes.qkv_width(), model_.sizes.head_dim};
    const double scale = 1.0 / std::sqrt(static_cast<double>(model_.sizes.head_dim));
    attention::attend(
        plan, index, query, buffers_.attended, static_cast<float>(scale), variant_);
}

// Moves these rows, which are ascending, to the front of the buffers that the rest of the layer
// reads.
void Forward::keep_rows(const attention::RowChoice& rows) {
    const size_t hidden_bytes = model_.sizes.hidden * sizeof(float);
    const size_t attended_bytes = model_.sizes.query_width() * element_bytes_;
    const auto move = [](void* data, size_t row_bytes, int64_t to, int64_t from) {
        char* rows_data = static_cast<char*>(data);
        std::memmove(rows_data + to * row_bytes, rows_data + from * row_bytes, row_bytes);
    };
    for (int64_t i = 0; i < rows.num_rows; ++i) {
        if (rows.rows[i] == i) continue;
        move(buffers_.hidden, hidden_bytes, i, rows.rows[i]);
        move(buffers_.attended, attended_bytes, i, rows.rows[i]);
    }
    num_rows_ = rows.num_rows;
}

void Forward::finish_attention(const Layer& layer) {
    add_product(layer.attention_out, buffers_.attended);
}

void Forward::finish_layer(const Layer& layer) {
    normalise(layer.mlp_norm);
    multiply(layer.gate_up, buffers_.normed, num_rows_, Result::kGatedSilu, buffers_.inner,
        model_.sizes.inner);
    add_product(layer.down, buffers_.inner);
}

// Not rounded to the model's type, since they are not the input of a product.
void Forward::compute_states(const std::vector<int64_t>& rows, float* out) {
    const int64_t size = model_.sizes.hidden;
    for (size_t first = 0, end = 0; first < rows.size(); first = end) {
        end = first + 1;
        while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
        const float* run = buffers_.hidden + rows[first] * size;
        rows::normalise({run, model_.final_norm, model_.norm_eps, size, out + first * size},
            static_cast<int64_t>(end - first), false, variant_);
    }
}

void Forward::compute_logits(float* logits) {
    normalise(model_.final_norm);
    multiply(model_.lm_head, buffers_.normed, num_rows_, Result::kStoreFloat,
        logits + model_.sizes.first_token_id, model_.sizes.vocab);
}

void Forward::normalise(const float* weight) {
    rows::normalise(
        {buffers_.hidden, weight, model_.norm_eps, model_.sizes.hidden, buffers_.normed},
        num_rows_, model_.is_bfloat16, variant_);
}

// Adds a product to the residual stream. Each rank has a share of the inputs, so the product is the
// sum of those of all ranks.
void Forward::add_product(const linear::PackedMatrix& matrix, const void* x) {
    if (group_ == nullptr) {
        multiply(matrix, x, num_rows_, Result::kAdd, buffers_.hidden, matrix.num_out);
        return;
    }
    const int64_t width = matrix.num_out, at_once = group_->rows_at_once(width);
    const size_t row_bytes = matrix.num_in * element_bytes_;
    for (int64_t first = 0; first < num_rows_; first += at_once) {
        const int64_t count = std::min(at_once, num_rows_ - first);
        const void* rows = static_cast<const char*>(x) + first * row_bytes;
        multiply(matrix, rows, count, Result::kStoreFloat, group_->part(), width);
        group_->sum(buffers_.hidden + first * width, count, width, true);
    }
}

// x is contiguous; out_stride is in elements.
void Forward::multiply(
    const linear::PackedMatrix& matrix, const void* x, int64_t num_rows, Result result, void* out,
    int64_t out_stride) {
    const linear::Product product{
        .matrix = &matrix,
        .x = x,
        .is_bfloat16 = model_.is_bfloat16,
        .x_stride = matrix.num_in,
        .num_rows = num_rows,
        .result = result,
        .out = out,
        .out_stride = out_stride,
    };
    linear::multiply(product, variant_);
}

}  // namespace pdserve::decoder
