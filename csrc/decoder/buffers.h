// The activations of a step, in one piece of memory that is kept between steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "model.h"

namespace pdserve::decoder {

struct Buffers {
    float* hidden;       // [num_tokens, hidden], the residual stream: always float32
    void* normed;        // [num_tokens, hidden]
    void* qkv;           // [num_tokens, row_width]
    void* attended;      // [num_tokens, query_width], or state_values
    float* recurrent_rows;  // [num_tokens, input_width] of layers with a state
    float* latent_rows;   // [num_tokens, head_dim or query_rank], latent vectors before their norm
    void* latent_normed;  // likewise, behind it
    void* head_rows;      // [num_tokens, num_heads, query_dim or value_dim] of latent attention
    void* inner;         // [num_tokens, inner]; with experts, that of their rows
    float* scores;       // [num_tokens, num_experts]
    void* expert_rows;   // [num_tokens * num_chosen, hidden], inputs of experts, then float results
    float* shared_rows;    // [num_tokens, hidden], what a shared expert has made
    float* shared_scores;  // [num_tokens]
    float* made;         // [num_tokens, hidden], of a sublayer with a norm behind it
    float* cos_sin;      // [num_ropes, num_tokens, rope_dim]
    float* mean_squares; // [num_tokens, 2], of query heads and of key heads, if ranks share these
    int64_t* slots;      // [num_tokens]
    size_t num_bytes;

    // With null memory, only num_bytes is valid.
    Buffers(void* memory, const Sizes& sizes, int64_t num_tokens, size_t element_bytes)
        : num_bytes(0) {
        const auto carve = [&](int64_t row_width, size_t width_bytes) -> void* {
            void* start = static_cast<char*>(memory) + num_bytes;
            num_bytes += (num_tokens * row_width * width_bytes + 63) / 64 * 64;
            return start;
        };
        hidden = static_cast<float*>(carve(sizes.hidden, sizeof(float)));
        normed = carve(sizes.hidden, element_bytes);
        qkv = carve(sizes.row_width(), element_bytes);
        attended = carve(std::max(sizes.query_width(), sizes.state_values()), element_bytes);
        recurrent_rows = static_cast<float*>(carve(
            sizes.has_states() ? recurrent::input_width(sizes.recurrent) : 0, sizeof(float)));
        const Latent& latent = sizes.latent;
        const int64_t latent_dim =
            sizes.is_latent() ? std::max(sizes.head_dim, latent.query_rank) : 0;
        latent_rows = static_cast<float*>(carve(latent_dim, sizeof(float)));
        latent_normed = carve(latent_dim, element_bytes);
        head_rows = carve(
            sizes.num_heads * std::max(latent.query_dim(), latent.value_dim), element_bytes);
        inner = carve(sizes.inner, element_bytes);
        scores = static_cast<float*>(carve(sizes.num_experts, sizeof(float)));
        expert_rows = carve(sizes.num_chosen * sizes.hidden, sizeof(float));
        shared_rows = static_cast<float*>(carve(sizes.num_shared * sizes.hidden, sizeof(float)));
        shared_scores = static_cast<float*>(carve(sizes.num_shared, sizeof(float)));
        made = static_cast<float*>(
            carve(sizes.has_after_norms ? sizes.hidden : 0, sizeof(float)));
        cos_sin = static_cast<float*>(carve(sizes.num_ropes * sizes.rope_dim, sizeof(float)));
        mean_squares =
            static_cast<float*>(carve(sizes.norms_heads_together ? 2 : 0, sizeof(float)));
        slots = static_cast<int64_t*>(carve(1, sizeof(int64_t)));
    }
};

}  // namespace pdserve::decoder
