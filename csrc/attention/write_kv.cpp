// The checked launcher of write_kv, and its kernel. It does little, so one build serves every CPU.

#include "write_kv.h"

#include <algorithm>
#include <string>

#include "../tensor_view.h"
#include "../threads/thread_pool.h"
#include "kernels/store/stored_rows.h"
#include "pool_view.h"

namespace nb = nanobind;

namespace pdserve::attention {

namespace {

// Below this, waking a thread costs more than the copy.
constexpr int64_t kBytesPerItem = 128 * 1024;

// Of a layer, in elements of the pool.
struct Target {
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t row_elements;
    int64_t block_stride;
};

using WriteToken = void (*)(void*, const Target&, const TensorView&, int64_t, int64_t);

// Stores `key` or `value`, of type T, of one token in a pool of S.
template <class T, class S>
void write_token(
    void* layer_pool, const Target& to, const TensorView& source, int64_t token, int64_t slot) {
    S* row = static_cast<S*>(layer_pool) + slot / to.block_size * to.block_stride
        + slot % to.block_size * to.row_elements;
    const T* from = source.data<T>() + token * source.stride(0);
    for (int64_t h = 0; h < to.num_kv_heads; ++h) {
        store_row(from, static_cast<int>(to.head_dim), row);
        row += to.block_size * to.row_elements;
        from += source.stride(1);
    }
}

template <class T>
WriteToken writer_of(KvFormat format) {
    if (!is_coded(format)) return write_token<T, T>;
    return format == KvFormat::kInt8 ? write_token<T, Int8> : write_token<T, Fp8>;
}

void check_source(const TensorView& source, const PoolView& pool, int64_t num_tokens) {
    pool.expect_fits(source);
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
    const bool has_values = !value_object.is_none();
    const TensorView value(has_values ? value_object : key_object, "value");
    if (has_values != (pool.num_planes == 2)) {
        raise_value_error("value", "one if and only if kv_pool has two planes", "otherwise");
    }
    check_slots(slots, -1, pool);
    const int64_t num_tokens = slots.size(0);
    check_source(key, pool, num_tokens);
    check_source(value, pool, num_tokens);
    value.expect_type_of(key);
    const int64_t* slot_of = slots.data<int64_t>();

    const Target target{pool.num_kv_heads, pool.head_dim, pool.block_size, pool.row_elements,
        pool.block_stride};
    char* values_pool = pool.layer_pool + pool.pool().value_offset() * element_bytes(pool.format);
    const WriteToken write = key.type() == ElementType::kBFloat16
        ? writer_of<BFloat16>(pool.format)
        : writer_of<float>(pool.format);
    const int64_t token_bytes =
        pool.num_planes * pool.num_kv_heads * pool.row_elements * element_bytes(pool.format);
    const int64_t tokens_per_item = std::max<int64_t>(1, kBytesPerItem / token_bytes);
    const int64_t num_items = (num_tokens + tokens_per_item - 1) / tokens_per_item;

    nb::gil_scoped_release release;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t last = std::min(num_tokens, (item + 1) * tokens_per_item);
        for (int64_t token = item * tokens_per_item; token < last; ++token) {
            write(pool.layer_pool, target, key, token, slot_of[token]);
            if (has_values) write(values_pool, target, value, token, slot_of[token]);
        }
    });
}

}  // namespace pdserve::attention
