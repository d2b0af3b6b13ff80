// A reader copies a block and then checks its generation. So the new generation must be visible
// before the first byte that the block's next owner writes.

#include "generations.h"

#include <atomic>
#include <string>

#include "../tensor_view.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

template <class Id>
void bump(uint64_t* generations, int64_t num_blocks, const Id* ids, int64_t num_ids) {
    for (int64_t i = 0; i < num_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= num_blocks) {
            raise_value_error("ids[" + std::to_string(i) + "]",
                "a block id below " + std::to_string(num_blocks), std::to_string(ids[i]));
        }
    }
    for (int64_t i = 0; i < num_ids; ++i) {
        std::atomic_ref<uint64_t>(generations[ids[i]]).fetch_add(1, std::memory_order_seq_cst);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void bump_generations(nb::handle generations_object, nb::handle ids_object) {
    const TensorView generations(generations_object, "generations", Access::kWrite);
    generations.expect_type({ElementType::kUInt64});
    generations.expect_shape({-1}, "[num_blocks]");
    generations.expect_contiguous();
    const TensorView ids(ids_object, "ids");
    ids.expect_type({ElementType::kInt32, ElementType::kInt64});
    ids.expect_shape({-1}, "[num_ids]");
    ids.expect_contiguous();
    uint64_t* data = generations.data<uint64_t>();
    if (ids.type() == ElementType::kInt32) {
        bump(data, generations.size(0), ids.data<int32_t>(), ids.size(0));
    } else {
        bump(data, generations.size(0), ids.data<int64_t>(), ids.size(0));
    }
}

}  // namespace

void bind_generations(nb::module_& m) {
    m.def("bump_generations", &bump_generations, nb::arg("generations"), nb::arg("ids"),
        "Add one to each named block's generation, atomically, before anything written after it.");
}

}  // namespace pdserve
