// The arguments of a step as Python passes them, and every check of them.
#pragma once

#include <optional>

#include <nanobind/nanobind.h>

#include "../../attention/batch_view.h"
#include "../../attention/pool_view.h"
#include "../../tensor_view.h"
#include "../model.h"
#include "inputs.h"

namespace pdserve::decoder {

class StepView {
public:
    // `state_rows` and `states_out` are both None, or neither is; so are `taps` and `taps_out`, and
    // `companions` and `places`, and `state_tables` and `kept_after`.
    // Raises TypeError or ValueError: a dtype, shape, stride or value; or a pool of another model.
    StepView(const Model& model, nanobind::handle token_ids, nanobind::handle positions,
        nanobind::handle query_start, nanobind::handle context_lens, nanobind::handle block_tables,
        nanobind::handle sampled_rows, nanobind::handle kv_pool, nanobind::handle out,
        nanobind::handle state_rows, nanobind::handle states_out, nanobind::handle taps,
        nanobind::handle taps_out, nanobind::handle companions, nanobind::handle places,
        nanobind::handle state_tables, nanobind::handle kept_after);

    // Borrows the arrays.
    Inputs inputs(const Model& model) const;

private:
    void check_tokens(const Model& model) const;
    void check_positions() const;
    void check_pool(const Model& model) const;
    void check_sampled(const Model& model) const;
    void check_states(const Model& model) const;
    void check_taps(const Model& model) const;
    void check_companions(const Model& model) const;
    void check_seen(const Model& model) const;
    void check_state_tables(const Model& model) const;
    int64_t block_bytes() const;

    TensorView token_ids_;
    TensorView positions_;
    attention::BatchView batch_;
    TensorView sampled_rows_;
    attention::PoolView pool_;
    TensorView out_;
    std::optional<TensorView> state_rows_;  // none: no states are wanted
    std::optional<TensorView> states_out_;
    std::optional<TensorView> taps_;  // none: no rows are copied out
    std::optional<TensorView> taps_out_;
    std::optional<TensorView> companions_;  // none: all layers of a token are in one block
    std::optional<TensorView> places_;
    std::optional<TensorView> state_tables_;  // none: no layer has a state
    std::optional<TensorView> kept_after_;
};

}  // namespace pdserve::decoder
