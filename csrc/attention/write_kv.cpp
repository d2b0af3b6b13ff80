// The checked launcher of write_kv, and its kernel. It only copies, so one build serves every CPU.

#include "write_kv.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../tensor_view.h"
#include "../threads/thread_pool.h"
#include "pool_view.h"

namespace nb = nanobind;

namespace pdserve::attention {

namespace {

// Below this, waking a thread costs more than the copy.
constexpr int64_t kBytesPerItem = 128 * 1024;

// Byte-wise view of `key` or `value`.
struct Source {
    const char* data;
    int64_t row_stride;
    int64_t head_stride;

    explicit Source(const TensorView& tensor)
        : data(tensor.data<char>()),
          row_stride(tensor.stride(0) * static_cast<int64_t>(tensor.element_bytes())),
          head_stride(tensor.stride(1) * static_cast<int64_t>(tensor.element_bytes())) {}
};

struct Sizes {
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t row_bytes;     // one head of one token
    int64_t block_stride;  // bytes
};

void write_token(
    char* layer_pool, const Sizes& sizes, const Source& source, int64_t token, int64_t slot) {
    const int64_t offset = slot % sizes.block_size;
    char* target =
        layer_pool + slot / sizes.block_size * sizes.block_stride + offset * sizes.row_bytes;
    const char* row = source.data + token * source.row_stride;
    for (int64_t h = 0; h < sizes.num_kv_heads; ++h) {
        std::memcpy(target, row, sizes.row_bytes);
        target += sizes.block_size * sizes.row_bytes;
        row += source.head_stride;
    }
}

void check_source(const TensorView& source, const PoolView& pool, int64_t num_tokens) {
    source.expect_type_of(pool.tensor);
    source.expect_shape(
        {num_tokens, pool.num_kv_heads, pool.head_dim}, "[num_tokens, num_kv_heads, head_dim]");
    source.expect_contiguous_last_dim();
}

}  // namespace

void check_slots(const TensorView& slots, int64_t num_tokens, const PoolView& pool) {
    slots.expect_type({ElementType::kInt64});
    slots.expect_shape({num_tokens}, "[num_tokens]");
    slots.expect_contiguous();
    const int64_t* slot_of = slots.data<int64_t>();
    const int64_t num_slots = pool.num_blocks * pool.block_size;
    for (int64_t i = 0; i < slots.size(0); ++i) {
        if (slot_of[i] < 0 || slot_of[i] >= num_slots) {
            raise_value_error("slot_mapping[" + std::to_string(i) + "]",
                "a slot below " + std::to_string(num_slots) + ", kv_pool's blocks x block size",
                std::to_string(slot_of[i]));
        }
    }
}

void write_kv(nb::handle kv_pool, int64_t layer, nb::handle key_object, nb::handle value_object,
    nb::handle slot_mapping) {
    const PoolView pool(kv_pool, layer, Access::kWrite);
    const TensorView slots(slot_mapping, "slot_mapping");
    const TensorView key(key_object, "key");
    const TensorView value(value_object, "value");
    check_slots(slots, -1, pool);
    const int64_t num_tokens = slots.size(0);
    check_source(key, pool, num_tokens);
    check_source(value, pool, num_tokens);
    const int64_t* slot_of = slots.data<int64_t>();

    const int64_t element_bytes = static_cast<int64_t>(pool.tensor.element_bytes());
    const Sizes sizes{pool.num_kv_heads, pool.block_size, pool.head_dim * element_bytes,
        pool.block_stride * element_bytes};
    char* values_pool = pool.layer_pool + pool.layer_elements / 2 * element_bytes;
    const Source keys(key), values(value);
    const int64_t token_bytes = 2 * sizes.num_kv_heads * sizes.row_bytes;
    const int64_t tokens_per_item = std::max<int64_t>(1, kBytesPerItem / token_bytes);
    const int64_t num_items = (num_tokens + tokens_per_item - 1) / tokens_per_item;

    nb::gil_scoped_release release;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t last = std::min(num_tokens, (item + 1) * tokens_per_item);
        for (int64_t token = item * tokens_per_item; token < last; ++token) {
            write_token(pool.layer_pool, sizes, keys, token, slot_of[token]);
            write_token(values_pool, sizes, values, token, slot_of[token]);
        }
    });
}

}  // namespace pdserve::attention
