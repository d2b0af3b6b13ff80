#include "launch.h"

#include "../isa/build_name.h"
#include "../scratch_buffer.h"
#include "../threads/thread_pool.h"
#include "group_state.h"

namespace pdserve::recurrent {

namespace {

// As many as any build's Scratch needs.
int64_t scratch_size(const Shape& shape) {
    const auto padded = [](int64_t size) { return size + 16; };
    const int64_t channels = channels_of(shape);
    return kChunk
        * (padded(shape.key_dim) + padded(channels) + 2 * padded(shape.value_dim) + 2 * kChunk + 2)
        + padded(shape.value_dim) + padded((shape.kernel - 1) * channels);
}

// A request's rows in a group of a layer: those of the step.
struct Group {
    const Layer& layer;
    int64_t row;  // the first
    int64_t group;

    Rows rows(int64_t first, int64_t num_rows) const {
        const Shape& shape = layer.shape;
        const int64_t channels = channels_of(shape), values = shape.group_size * shape.value_dim;
        const int64_t width = input_width(shape), out_stride = shape.num_groups * values;
        const float* const inputs = layer.inputs + (row + first) * width;
        const int64_t at = (row + first) * out_stride + group * values;
        Weights weights = layer.weights;
        weights.taps += group * shape.kernel * channels;
        weights.decay += group * shape.group_size;
        weights.decay_bias += group * shape.group_size;
        Rows rows{};
        rows.shape = shape;
        rows.weights = weights;
        rows.num_rows = num_rows;
        rows.inputs = inputs + group * (channels + values);
        rows.betas =
            inputs + shape.num_groups * (channels + values) + 2 * group * shape.group_size;
        rows.stride = width;
        rows.out = static_cast<char*>(layer.out) + at * (layer.to_bfloat16 ? 2 : 4);
        rows.out_stride = out_stride;
        return rows;
    }
};

void mix_group(const Layer& layer, const attention::Step& step, const States& states,
    int64_t request, int64_t group, Function function) {
    thread_local ScratchBuffer scratch;
    thread_local GroupRows found;
    const Shape& shape = layer.shape;
    const int64_t num_bytes = group_state(shape) * static_cast<int64_t>(sizeof(float));
    const Stretch stretch{states.pool, states.block_bytes,
        (layer.number * shape.model_groups + shape.first_group + group) * num_bytes, num_bytes};
    const int64_t row = step.query_start[request];
    const int64_t num_rows = step.query_start[request + 1] - row;
    const int64_t num_before = step.context_lens[request] - num_rows;
    const int32_t *own = states.own(request), *before = states.before(request);
    if (num_before == 0) {
        stretch.clear(own);
    } else if (before[0] != own[0]) {
        stretch.copy(before, own);
    }
    const Group of_step{layer, row, group};
    const State state = found.open(shape, stretch, own);
    const auto go_on = [&](int64_t first, int64_t count) {
        Rows rows = of_step.rows(first, count);
        rows.num_before = (num_before + first) % kChunk;
        rows.state = state;
        rows.scratch = scratch.of<float>(scratch_size(shape));
        function(rows);
        found.close();
    };
    const int64_t kept_after = states.kept_after[request];
    if (kept_after > 0) {
        go_on(0, kept_after);
        stretch.copy(own, states.kept(request));
    }
    if (kept_after < num_rows) go_on(kept_after, num_rows - kept_after);
}

}  // namespace

int64_t group_state(const Shape& shape) {
    const int64_t size = shape.group_size;
    return (shape.kernel - 1) * channels_of(shape) + size * shape.key_dim * shape.value_dim
        + kChunk * (shape.key_dim + size * shape.value_dim) + size * (kChunk + 1);
}

int64_t input_width(const Shape& shape) {
    const int64_t values = shape.group_size * shape.value_dim;
    return shape.num_groups * (channels_of(shape) + values + 2 * shape.group_size);
}

void mix(const Layer& layer, const attention::Step& step, const States& states, Variant variant) {
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant, Kernels);
    const Function function = layer.to_bfloat16 ? kernels.to_bfloat16 : kernels.to_float32;
    const int64_t num_groups = layer.shape.num_groups;
    ThreadPool::instance().parallel_for(step.num_requests * num_groups, [&](int64_t item) {
        mix_group(layer, step, states, item / num_groups, item % num_groups, function);
    });
}

}  // namespace pdserve::recurrent
