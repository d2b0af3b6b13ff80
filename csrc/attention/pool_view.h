// The KV pool as a launcher sees it: checked once, with names for its dimensions.
#pragma once

#include <cstdint>
#include <string>

#include "../tensor_view.h"
#include "layer.h"

namespace pdserve::attention {

// Of the elements of a pool; those of Fp8 are bytes, as not every torch can hand over float8.
inline KvFormat format_of(ElementType type) {
    switch (type) {
        case ElementType::kBFloat16: return KvFormat::kBFloat16;
        case ElementType::kInt8: return KvFormat::kInt8;
        case ElementType::kUInt8: return KvFormat::kFp8;
        default: return KvFormat::kFloat32;
    }
}

// Codes by their name; raises ValueError.
inline KvFormat codes_named(const std::string& name) {
    if (name == "int8") return KvFormat::kInt8;
    if (name == "fp8") return KvFormat::kFp8;
    raise_value_error("format", "int8 or fp8", name);
}

struct PoolView {
    TensorView tensor;
    int64_t num_blocks;
    int64_t num_planes;  // keys and values; or 1, whose rows are both
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t head_dim;
    KvFormat format;
    int64_t row_elements;    // head_dim, or as many codes and the bytes of a scale
    int64_t block_stride;    // elements
    int64_t layer_elements;  // of one block: all planes of all heads
    char* layer_pool;        // kv_pool[0, layer]

    PoolView(nanobind::handle kv_pool, int64_t layer, Access access)
        : tensor(kv_pool, "kv_pool", access) {
        tensor.expect_type({ElementType::kFloat32, ElementType::kBFloat16, ElementType::kInt8,
            ElementType::kUInt8});
        tensor.expect_shape({-1, -1, -1, -1, -1, -1},
            "[num_blocks, num_layers, num_planes, num_kv_heads, block_size, row]");
        tensor.expect_contiguous();
        const int64_t num_layers = tensor.size(1);
        if (layer < 0 || layer >= num_layers) {
            raise_value_error("layer", "0 to " + std::to_string(num_layers - 1),
                std::to_string(layer));
        }
        num_blocks = tensor.size(0);
        num_planes = tensor.size(2);
        if (num_planes < 1 || num_planes > 2) {
            raise_value_error("kv_pool", "1 or 2 planes", std::to_string(num_planes));
        }
        num_kv_heads = tensor.size(3);
        block_size = tensor.size(4);
        format = format_of(tensor.type());
        row_elements = tensor.size(5);
        head_dim = row_elements - (is_coded(format) ? kScaleBytes : 0);
        if (num_kv_heads < 1 || block_size < 1 || head_dim < 1) {
            raise_value_error("kv_pool", "at least one KV head, token and element a block",
                std::to_string(num_kv_heads) + ", " + std::to_string(block_size) + " and "
                    + std::to_string(head_dim));
        }
        if (num_kv_heads > INT32_MAX || block_size > INT32_MAX || head_dim > INT32_MAX
            || num_layers > INT32_MAX) {
            raise_value_error("kv_pool", "sizes below 2**31", "a larger one");
        }
        layer_elements = num_planes * num_kv_heads * block_size * row_elements;
        block_stride = num_layers * layer_elements;
        layer_pool = tensor.data<char>()
            + layer * layer_elements * static_cast<int64_t>(tensor.element_bytes());
    }

    // Raises TypeError: queries, keys or values that this pool is not for.
    void expect_fits(const TensorView& rows) const {
        if (!is_coded(format)) return rows.expect_type_of(tensor);
        rows.expect_type({ElementType::kFloat32, ElementType::kBFloat16});
    }

    Pool pool() const { return heads(0, num_kv_heads); }

    // The same pool for a rank that has only these heads, which the caller has checked.
    Pool heads(int64_t first, int64_t num_heads) const {
        const int64_t first_element = first * block_size * row_elements;
        return {
            .data = tensor.data<char>()
                + first_element * static_cast<int64_t>(tensor.element_bytes()),
            .format = format,
            .num_layers = static_cast<int>(tensor.size(1)),
            .num_planes = static_cast<int>(num_planes),
            .pool_heads = static_cast<int>(num_kv_heads),
            .num_kv_heads = static_cast<int>(num_heads),
            .block_size = static_cast<int>(block_size),
            .head_dim = static_cast<int>(head_dim),
        };
    }
};

}  // namespace pdserve::attention
