// The KV pool as a launcher sees it: checked once, with names for its dimensions.
#pragma once

#include <cstdint>
#include <string>

#include "../tensor_view.h"
#include "layer.h"

namespace pdserve::attention {

struct PoolView {
    TensorView tensor;
    int64_t num_blocks;
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t block_stride;    // elements
    int64_t layer_elements;  // of one block: K and V of all heads
    char* layer_pool;        // kv_pool[0, layer]

    PoolView(nanobind::handle kv_pool, int64_t layer, Access access)
        : tensor(kv_pool, "kv_pool", access) {
        tensor.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
        tensor.expect_shape({-1, -1, 2, -1, -1, -1},
            "[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]");
        tensor.expect_contiguous();
        const int64_t num_layers = tensor.size(1);
        if (layer < 0 || layer >= num_layers) {
            raise_value_error("layer", "0 to " + std::to_string(num_layers - 1),
                std::to_string(layer));
        }
        num_blocks = tensor.size(0);
        num_kv_heads = tensor.size(3);
        block_size = tensor.size(4);
        head_dim = tensor.size(5);
        if (num_kv_heads < 1 || block_size < 1 || head_dim < 1) {
            raise_value_error("kv_pool", "at least one KV head, token and element a block",
                std::to_string(num_kv_heads) + ", " + std::to_string(block_size) + " and "
                    + std::to_string(head_dim));
        }
        if (num_kv_heads > INT32_MAX || block_size > INT32_MAX || head_dim > INT32_MAX
            || num_layers > INT32_MAX) {
            raise_value_error("kv_pool", "sizes below 2**31", "a larger one");
        }
        layer_elements = 2 * num_kv_heads * block_size * head_dim;
        block_stride = num_layers * layer_elements;
        layer_pool = tensor.data<char>()
            + layer * layer_elements * static_cast<int64_t>(tensor.element_bytes());
    }

    Pool pool() const { return heads(0, num_kv_heads); }

    // The same pool for a rank that has only these heads, which the caller has checked.
    Pool heads(int64_t first, int64_t num_heads) const {
        const int64_t first_element = first * block_size * head_dim;
        return {
            .data = tensor.data<char>()
                + first_element * static_cast<int64_t>(tensor.element_bytes()),
            .is_bfloat16 = tensor.type() == ElementType::kBFloat16,
            .num_layers = static_cast<int>(tensor.size(1)),
            .pool_heads = static_cast<int>(num_kv_heads),
            .num_kv_heads = static_cast<int>(num_heads),
            .block_size = static_cast<int>(block_size),
            .head_dim = static_cast<int>(head_dim),
        };
    }
};

}  // namespace pdserve::attention
