// The residual stream is float32 throughout; only the inputs of products and of attention are
// rounded to the model's type. In the last layer, all rows need keys and values; the rest is
// computed only for rows that are sampled or whose states are needed.

#include "forward.h"

#include <cmath>
#include <cstring>

#include "../rows/launch.h"
#include "../thread_pool.h"
#include "positions.h"

namespace pdserve::decoder {

using linear::Result;

Forward::Forward(const Model& model, Variant variant)
    : model_(model),
      variant_(variant),
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

void Forward::run(const Inputs& inputs, const Written& written) {
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
    rows::look_up({model_.embedding, inputs.token_ids, model_.sizes.hidden, buffers_.hidden},
        num_rows_, model_.is_bfloat16, variant_);

    const int last = static_cast<int>(model_.layers.size()) - 1;
    for (int index = 0; index <= last; ++index) {
        const Layer& layer = model_.layers[index];
        write_kv(layer, index);
        if (written) written(index + 1);
        if (index == last && kept.all().num_rows == 0) return;
        attend(index, index == last ? last_plan_ : plan_of(layer));
        if (index == last) keep_rows(kept.all());
        finish_layer(layer);
    }
    compute_states(kept.states(), inputs.states_out);
    if (kept.is_mixed()) keep_rows(kept.sampled());
    if (num_rows_ > 0) compute_logits(inputs.logits);
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
    multiply(layer.qkv, buffers_.normed, Result::kStore, buffers_.qkv);
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

void Forward::finish_layer(const Layer& layer) {
    multiply(layer.attention_out, buffers_.attended, Result::kAdd, buffers_.hidden);
    normalise(layer.mlp_norm);
    multiply(layer.gate_up, buffers_.normed, Result::kGatedSilu, buffers_.inner);
    multiply(layer.down, buffers_.inner, Result::kAdd, buffers_.hidden);
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
    multiply(model_.lm_head, buffers_.normed, Result::kStoreFloat, logits);
}

void Forward::normalise(const float* weight) {
    rows::normalise(
        {buffers_.hidden, weight, model_.norm_eps, model_.sizes.hidden, buffers_.normed},
        num_rows_, model_.is_bfloat16, variant_);
}

// x and out are contiguous.
void Forward::multiply(
    const linear::PackedMatrix& matrix, const void* x, Result result, void* out) {
    const linear::Product product{
        .matrix = &matrix,
        .x = x,
        .is_bfloat16 = model_.is_bfloat16,
        .x_stride = matrix.num_in,
        .num_rows = num_rows_,
        .result = result,
        .out = out,
        .out_stride = result == Result::kGatedSilu ? matrix.num_out / 2 : matrix.num_out,
    };
    linear::multiply(product, variant_);
}

}  // namespace pdserve::decoder
