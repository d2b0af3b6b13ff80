#include "launch.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../isa/build_name.h"
#include "../threads/thread_pool.h"

namespace pdserve::recurrent {

namespace {

constexpr int64_t kMostLanes = 16;

int64_t channels_of(const Shape& shape) {
    return 2 * shape.key_dim + shape.group_size * shape.value_dim;
}

// As many as any build's Scratch needs.
int64_t scratch_size(const Shape& shape) {
    const auto padded = [](int64_t size) { return size + kMostLanes; };
    const int64_t of_heads = shape.group_size * shape.key_dim * padded(shape.value_dim);
    return 2 * padded(shape.key_dim) + 2 * padded(shape.value_dim)
        + padded(channels_of(shape)) + padded((shape.kernel - 1) * channels_of(shape)) + of_heads;
}

// Calls body(bytes of a block, offset in the whole, count) for a stretch of a request's state.
template <class Body>
void each_stretch(
    const States& states, int64_t request, int64_t first, int64_t num_bytes, const Body& body) {
    const int32_t* const table = states.tables + request * states.table_stride;
    for (int64_t done = 0; done < num_bytes;) {
        const int64_t at = first + done, within = at % states.block_bytes;
        const int64_t count = std::min(num_bytes - done, states.block_bytes - within);
        const int64_t block = table[at / states.block_bytes];
        body(states.pool + block * states.block_bytes + within, done, count);
        done += count;
    }
}

void mix_group(const Layer& layer, const attention::Step& step, const States& states,
    int64_t request, int64_t group, Function function) {
    thread_local std::vector<float> memory;
    const Shape& shape = layer.shape;
    const int64_t size = group_state(shape), width = input_width(shape);
    memory.resize(size + scratch_size(shape));
    auto* const bytes = reinterpret_cast<char*>(memory.data());
    const int64_t num_bytes = size * static_cast<int64_t>(sizeof(float));
    const int64_t first = (layer.number * shape.num_groups + group) * num_bytes;
    const int64_t row = step.query_start[request];
    const int64_t num_rows = step.query_start[request + 1] - row;
    if (step.context_lens[request] == num_rows) {
        std::memset(bytes, 0, num_bytes);
    } else {
        each_stretch(states, request, first, num_bytes,
            [&](const char* from, int64_t at, int64_t count) {
                std::memcpy(bytes + at, from, count);
            });
    }
    const int64_t channels = channels_of(shape), values = shape.group_size * shape.value_dim;
    const float* const inputs = layer.inputs + row * width;
    Weights weights = layer.weights;
    weights.taps += group * shape.kernel * channels;
    weights.decay += group * shape.group_size;
    weights.decay_bias += group * shape.group_size;
    const int64_t out_stride = shape.num_groups * values;
    const int64_t element_bytes = layer.to_bfloat16 ? 2 : 4;
    function({
        .shape = shape,
        .weights = weights,
        .num_rows = num_rows,
        .inputs = inputs + group * (channels + values),
        .betas = inputs + shape.num_groups * (channels + values) + 2 * group * shape.group_size,
        .stride = width,
        .out = static_cast<char*>(layer.out)
            + (row * out_stride + group * values) * element_bytes,
        .out_stride = out_stride,
        .state = memory.data(),
        .scratch = memory.data() + size,
    });
    each_stretch(states, request, first, num_bytes, [&](char* to, int64_t at, int64_t count) {
        std::memcpy(to, bytes + at, count);
    });
}

}  // namespace

int64_t group_state(const Shape& shape) {
    return (shape.kernel - 1) * channels_of(shape)
        + shape.group_size * shape.key_dim * shape.value_dim;
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
