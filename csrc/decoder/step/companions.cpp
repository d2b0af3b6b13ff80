#include "companions.h"

#include <algorithm>

#include "positions.h"

namespace pdserve::decoder {

int32_t first_seen(const Model& model, int32_t context_len, int32_t num_rows) {
    int32_t longest = 0;
    for (const Layer& layer : model.layers) longest = std::max(longest, layer.sliding_window);
    return std::max(0, context_len - num_rows - longest + 1);
}

void Companions::lay_out(
    const Model& model, const Inputs& inputs, const attention::Step& first) {
    inputs_ = &inputs;
    first_ = &first;
    const auto count = static_cast<size_t>(inputs.num_companions);
    steps_.assign(count, first);
    tables_.resize(count);
    slots_.resize(count);
    for (size_t number = 0; number < count; ++number) {
        lay_out_one(model, static_cast<int64_t>(number));
    }
}

Companions::Place Companions::of(int64_t layer, int index) const {
    if (inputs_->num_companions == 0) return {first_, index};
    const int32_t* const place = inputs_->places + 2 * layer;
    return {place[0] == 0 ? first_ : &steps_[place[0] - 1], place[1]};
}

void Companions::lay_out_one(const Model& model, int64_t number) {
    attention::Step& step = steps_[number];
    const int64_t block_size = inputs_->pool.block_size;
    int64_t most_blocks = 1;
    for (int64_t r = 0; r < step.num_requests; ++r) {
        most_blocks =
            std::max<int64_t>(most_blocks, (step.context_lens[r] - 1) / block_size + 1);
    }
    std::vector<int32_t>& table = tables_[number];
    table.assign(step.num_requests * most_blocks, 0);
    for (int64_t r = 0; r < step.num_requests; ++r) {
        const int32_t length = step.context_lens[r];
        const int32_t num_rows = step.query_start[r + 1] - step.query_start[r];
        const int32_t* const blocks = first_->block_tables + r * first_->table_stride;
        const int64_t end = (length + block_size - 1) / block_size;
        for (int64_t b = first_seen(model, length, num_rows) / block_size; b < end; ++b) {
            table[r * most_blocks + b] =
                inputs_->companions[blocks[b] * inputs_->num_companions + number];
        }
    }
    step.block_tables = table.data();
    step.table_stride = most_blocks;
    slots_[number].resize(step.num_tokens);
    step.slots = slots_[number].data();
    locate(step, static_cast<int>(block_size), slots_[number].data());
}

}  // namespace pdserve::decoder
