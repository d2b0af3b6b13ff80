// Everything that the kernels of a step read is checked here, and not again later.

#include "step_view.h"

#include <string>

#include "../../rows/launch.h"
#include "companions.h"

namespace nb = nanobind;

namespace pdserve::decoder {

StepView::StepView(const Model& model, nb::handle token_ids, nb::handle positions,
    nb::handle query_start, nb::handle context_lens, nb::handle block_tables,
    nb::handle sampled_rows, nb::handle kv_pool, nb::handle out, nb::handle state_rows,
    nb::handle states_out, nb::handle taps, nb::handle taps_out, nb::handle companions,
    nb::handle places, nb::handle state_tables, nb::handle kept_after)
    : token_ids_(token_ids, "token_ids"),
      positions_(positions, "positions"),
      batch_(query_start, context_lens, block_tables),
      sampled_rows_(sampled_rows, "sampled_rows"),
      pool_(kv_pool, 0, Access::kWrite),
      out_(out, "out", Access::kWrite) {
    check_tokens(model);
    if (!companions.is_none() || !places.is_none()) {
        companions_.emplace(companions, "companions");
        places_.emplace(places, "places");
    }
    check_pool(model);
    batch_.check_values(token_ids_.size(0), pool_);
    check_positions();
    if (companions_) check_companions(model);
    check_sampled(model);
    if (!state_tables.is_none() || !kept_after.is_none()) {
        state_tables_.emplace(state_tables, "state_tables");
        kept_after_.emplace(kept_after, "kept_after");
    }
    check_state_tables(model);
    if (!state_rows.is_none() || !states_out.is_none()) {
        state_rows_.emplace(state_rows, "state_rows");
        states_out_.emplace(states_out, "states_out", Access::kWrite);
        check_states(model);
    }
    if (taps.is_none() && taps_out.is_none()) return;
    taps_.emplace(taps, "taps");
    taps_out_.emplace(taps_out, "taps_out", Access::kWrite);
    check_taps(model);
}

void StepView::check_tokens(const Model& model) const {
    token_ids_.expect_type({ElementType::kInt64});
    token_ids_.expect_shape({-1}, "[num_tokens]");
    token_ids_.expect_contiguous();
    rows::check_ids(
        token_ids_.data<int64_t>(), token_ids_.size(0), model.sizes.vocab, "token_ids");
}

// The rows of a request are its newest tokens. -1 - position: it is a long one.
void StepView::check_positions() const {
    positions_.expect_type({ElementType::kInt64});
    positions_.expect_shape({token_ids_.size(0)}, "[num_tokens]");
    positions_.expect_contiguous();
    const int64_t* const positions = positions_.data<int64_t>();
    for (int64_t r = 0; r < batch_.num_requests; ++r) {
        const int64_t end = batch_.start(r + 1);
        for (int64_t t = batch_.start(r); t < end; ++t) {
            const int64_t expected = batch_.context_len(r) - (end - t);
            if (positions[t] == expected || positions[t] == -1 - expected) continue;
            raise_value_error("positions[" + std::to_string(t) + "]",
                std::to_string(expected) + " or " + std::to_string(-1 - expected),
                std::to_string(positions[t]));
        }
    }
}

void StepView::check_pool(const Model& model) const {
    pool_.tensor.expect_type({model.is_bfloat16 ? ElementType::kBFloat16 : ElementType::kFloat32,
        ElementType::kInt8, ElementType::kUInt8});
    const int64_t row_elements =
        model.sizes.head_dim + (attention::is_coded(pool_.format) ? attention::kScaleBytes : 0);
    pool_.tensor.expect_shape(
        {-1, companions_ ? -1 : model.sizes.pool_layers, model.sizes.num_planes(), model.sizes.model_kv_heads, -1,
            row_elements},
        "[num_blocks, num_layers, num_planes, num_kv_heads, block_size, row]");
}

void StepView::check_sampled(const Model& model) const {
    attention::check_rows(sampled_rows_, token_ids_.size(0), "sampled_rows");
    out_.expect_type({ElementType::kFloat32});
    out_.expect_shape({sampled_rows_.size(0), model.sizes.vocab}, "[num_sampled, vocab_size]");
    out_.expect_contiguous();
}

void StepView::check_states(const Model& model) const {
    attention::check_rows(*state_rows_, token_ids_.size(0), "state_rows");
    states_out_->expect_type({ElementType::kFloat32});
    states_out_->expect_shape(
        {state_rows_->size(0), model.sizes.hidden}, "[num_states, hidden_size]");
    states_out_->expect_contiguous();
}

void StepView::check_taps(const Model& model) const {
    taps_->expect_type({ElementType::kInt64});
    taps_->expect_shape({-1}, "[num_taps]");
    taps_->expect_contiguous();
    taps_out_->expect_type({ElementType::kFloat32});
    taps_out_->expect_shape({sampled_rows_.size(0), taps_->size(0), model.sizes.hidden},
        "[num_sampled, num_taps, hidden_size]");
    taps_out_->expect_contiguous();
}

void StepView::check_companions(const Model& model) const {
    companions_->expect_type({ElementType::kInt32});
    companions_->expect_shape({pool_.num_blocks, -1}, "[num_blocks, num_companions]");
    companions_->expect_contiguous();
    places_->expect_type({ElementType::kInt32});
    places_->expect_shape({static_cast<int64_t>(model.layers.size()), 2}, "[num_layers, 2]");
    places_->expect_contiguous();
    const int64_t num_companions = companions_->size(1), block_layers = pool_.tensor.size(1);
    const int32_t* const places = places_->data<int32_t>();
    for (size_t layer = 0; layer < model.layers.size(); ++layer) {
        const int32_t block = places[2 * layer], index = places[2 * layer + 1];
        if (block >= 0 && block <= num_companions && index >= 0 && index < block_layers) continue;
        raise_value_error("places[" + std::to_string(layer) + "]",
            "one of " + std::to_string(1 + num_companions) + " blocks of "
                + std::to_string(block_layers) + " layers",
            std::to_string(block) + ", " + std::to_string(index));
    }
    check_seen(model);
}

// Whatever a window reaches is there.
void StepView::check_seen(const Model& model) const {
    const int64_t num_companions = companions_->size(1);
    const int32_t* const companions = companions_->data<int32_t>();
    for (int64_t r = 0; r < batch_.num_requests; ++r) {
        const int32_t length = batch_.context_len(r), num_rows = batch_.start(r + 1) - batch_.start(r);
        const int32_t* const blocks =
            batch_.block_tables.data<int32_t>() + r * batch_.block_tables.stride(0);
        const int64_t end = (length + pool_.block_size - 1) / pool_.block_size;
        for (int64_t b = first_seen(model, length, num_rows) / pool_.block_size; b < end; ++b) {
            for (int64_t n = 0; n < num_companions; ++n) {
                const int32_t id = companions[blocks[b] * num_companions + n];
                if (id >= 0 && id < pool_.num_blocks) continue;
                raise_value_error("companions[" + std::to_string(blocks[b]) + "]",
                    "blocks of the pool, since windows reach their tokens", std::to_string(id));
            }
        }
    }
}

int64_t StepView::block_bytes() const {
    return pool_.block_stride * static_cast<int64_t>(pool_.tensor.element_bytes());
}

// A request's blocks hold its state, and no two requests have the same.
void StepView::check_state_tables(const Model& model) const {
    int64_t num_layers = 0;
    for (const Layer& layer : model.layers) num_layers += layer.is_recurrent();
    if ((num_layers > 0) != state_tables_.has_value()) {
        raise_value_error("state_tables", num_layers > 0 ? "blocks of states" : "none",
            num_layers > 0 ? "none" : "some");
    }
    if (!state_tables_) return;
    const int64_t state_bytes = num_layers * model.sizes.recurrent.model_groups
        * recurrent::group_state(model.sizes.recurrent) * static_cast<int64_t>(sizeof(float));
    state_tables_->expect_type({ElementType::kInt32});
    state_tables_->expect_shape(
        {batch_.num_requests, 3, (state_bytes + block_bytes() - 1) / block_bytes()},
        "[num_requests, 3, blocks of a state]");
    state_tables_->expect_contiguous();
    const int32_t* const ids = state_tables_->data<int32_t>();
    for (int64_t i = 0; i < state_tables_->size(0) * 3 * state_tables_->size(2); ++i) {
        if (ids[i] >= 0 && ids[i] < pool_.num_blocks) continue;
        raise_value_error("state_tables", "blocks of the pool", std::to_string(ids[i]));
    }
    kept_after_->expect_type({ElementType::kInt32});
    kept_after_->expect_shape({batch_.num_requests}, "[num_requests]");
    kept_after_->expect_contiguous();
    for (int64_t r = 0; r < batch_.num_requests; ++r) {
        const int32_t rows = kept_after_->data<int32_t>()[r];
        if (rows >= 0 && rows <= batch_.start(r + 1) - batch_.start(r)) continue;
        raise_value_error("kept_after", "rows of the request", std::to_string(rows));
    }
}

Inputs StepView::inputs(const Model& model) const {
    Inputs inputs{};
    inputs.token_ids = token_ids_.data<int64_t>();
    inputs.positions = positions_.data<int64_t>();
    inputs.step.num_requests = batch_.num_requests;
    inputs.step.num_tokens = token_ids_.size(0);
    inputs.step.query_start = batch_.query_start.data<int32_t>();
    inputs.step.context_lens = batch_.context_lens.data<int32_t>();
    inputs.step.block_tables = batch_.block_tables.data<int32_t>();
    inputs.step.table_stride = batch_.block_tables.stride(0);
    inputs.pool = pool_.heads(model.sizes.first_kv_head, model.sizes.num_kv_heads);
    inputs.sampled = {sampled_rows_.data<int64_t>(), sampled_rows_.size(0)};
    inputs.logits = out_.data<float>();
    if (state_rows_) {
        inputs.states = {state_rows_->data<int64_t>(), state_rows_->size(0)};
        inputs.states_out = states_out_->data<float>();
    }
    if (taps_) {
        inputs.taps = taps_->data<int64_t>();
        inputs.num_taps = taps_->size(0);
        inputs.taps_out = taps_out_->data<float>();
    }
    if (companions_) {
        inputs.companions = companions_->data<int32_t>();
        inputs.num_companions = companions_->size(1);
        inputs.places = places_->data<int32_t>();
    }
    if (state_tables_) {
        inputs.states_of_layers = {
            .pool = pool_.tensor.data<char>(),
            .block_bytes = block_bytes(),
            .tables = state_tables_->data<int32_t>(),
            .num_blocks = state_tables_->size(2),
            .kept_after = kept_after_->data<int32_t>(),
        };
    }
    return inputs;
}

}  // namespace pdserve::decoder
