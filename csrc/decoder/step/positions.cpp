// Computed anew for each step: a table for 128 Ki positions would take 64 MiB and save only
// microseconds.

#include "positions.h"

#include <algorithm>
#include <cmath>

#include "../../threads/thread_pool.h"

namespace pdserve::decoder {

namespace {

constexpr int64_t kTokensPerItem = 16;

}  // namespace

void locate(const attention::Step& step, int block_size, int64_t* slots) {
    for (int64_t r = 0; r < step.num_requests; ++r) {
        const int32_t* table = step.block_tables + r * step.table_stride;
        const int32_t end = step.query_start[r + 1];
        for (int32_t t = step.query_start[r]; t < end; ++t) {
            const int32_t position = step.context_lens[r] - (end - t);
            slots[t] = static_cast<int64_t>(table[position / block_size]) * block_size
                + position % block_size;
        }
    }
}

void turn(const Model& model, const int64_t* positions, int64_t num_tokens, float* cos_sin) {
    const int64_t num_angles = model.sizes.rope_dim / 2;
    const auto turn_token = [&](int64_t rope, int64_t token) {
        float* cosines = cos_sin + (rope * num_tokens + token) * 2 * num_angles;
        float* sines = cosines + num_angles;
        const bool is_long = positions[token] < 0;
        const int64_t position = is_long ? -1 - positions[token] : positions[token];
        const int64_t table = is_long ? model.sizes.num_ropes + rope : rope;
        const float* inverse_frequencies = model.inverse_frequencies + table * num_angles;
        const double scale = model.rope_scales[rope];
        for (int64_t i = 0; i < num_angles; ++i) {
            // The angle is rounded to float32 first, as in the models' training code.
            const float angle = static_cast<float>(position) * inverse_frequencies[i];
            // A pair that does not rotate stays as it is.
            const double own_scale = inverse_frequencies[i] == 0.0f ? 1.0 : scale;
            cosines[i] = static_cast<float>(std::cos(double{angle}) * own_scale);
            sines[i] = static_cast<float>(std::sin(double{angle}) * own_scale);
        }
    };
    const int64_t num_items = (num_tokens + kTokensPerItem - 1) / kTokensPerItem;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t end = std::min(num_tokens, (item + 1) * kTokensPerItem);
        for (int64_t token = item * kTokensPerItem; token < end; ++token) {
            for (int64_t rope = 0; rope < model.sizes.num_ropes; ++rope) turn_token(rope, token);
        }
    });
}

}  // namespace pdserve::decoder
