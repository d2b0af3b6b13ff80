// The launchers of rotate_and_write: the unchecked one for the decoder, and the checked one for
// Python.

#include "rotate_launch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "../bind.h"
#include "../isa/build_name.h"
#include "../tensor_view.h"
#include "../threads/thread_pool.h"
#include "kernels/store/rotate_kernel.h"
#include "layer.h"
#include "pool_view.h"
#include "store_launch.h"
#include "write_kv.h"

namespace nb = nanobind;

namespace pdserve::attention {

namespace {

void check_norm(const TensorView& norm, const PoolView& pool) {
    norm.expect_type({ElementType::kFloat32});
    norm.expect_shape({pool.head_dim}, "[head_dim]");
    norm.expect_contiguous();
}

std::optional<TensorView> norm_from(nb::handle object, const char* name, const PoolView& pool) {
    if (object.is_none()) return std::nullopt;
    TensorView norm(object, name);
    check_norm(norm, pool);
    return norm;
}

void check_qkv(
    const TensorView& qkv, const TensorView& cos_sin, int64_t num_heads, const PoolView& pool) {
    if (pool.num_planes != 2) {
        raise_value_error("kv_pool", "2 planes", std::to_string(pool.num_planes));
    }
    if (pool.head_dim % 2 != 0) {
        raise_value_error("kv_pool", "an even head_dim", std::to_string(pool.head_dim));
    }
    if (num_heads < 1 || num_heads > INT32_MAX) {
        raise_value_error("num_heads", "at least 1", std::to_string(num_heads));
    }
    pool.expect_fits(qkv);
    qkv.expect_shape({-1, (num_heads + 2 * pool.num_kv_heads) * pool.head_dim},
        "[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]");
    qkv.expect_contiguous_last_dim();
    cos_sin.expect_type({ElementType::kFloat32});
    cos_sin.expect_shape({qkv.size(0), pool.head_dim}, "[num_tokens, head_dim]");
    cos_sin.expect_contiguous();
}

float widened(BFloat16 number) {
    const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

}  // namespace

void rotate_and_write(
    const Step& step, const Pool& pool, int layer, const QkvRows& rows, Variant variant) {
    const RotateCall call{
        .qkv = rows.qkv,
        .row_stride = rows.stride,
        .num_heads = rows.num_heads,
        .num_kv_heads = pool.num_kv_heads,
        .head_dim = pool.head_dim,
        .q_norm = rows.q_norm,
        .k_norm = rows.k_norm,
        .norms_together = rows.norms_together,
        .mean_squares = rows.mean_squares,
        .norm_eps = rows.norm_eps,
        .cos_sin = rows.cos_sin,
        .to = stored_to(step, pool, layer),
        .value_offset = pool.value_offset(),
    };
    const RotateKernels& kernels = PDSERVE_OF_VARIANT(variant, RotateKernels);
    store_tokens(call, rows.is_bfloat16 ? kernels.bfloat16 : kernels.float32, pool,
        step.num_tokens,
        static_cast<int64_t>(rows.num_heads + 2 * pool.num_kv_heads) * pool.head_dim);
}

void measure_heads(const QkvRows& rows, int num_kv_heads, int head_dim, int64_t first,
    int64_t count, float* out) {
    const auto mean_square = [&](int64_t row, int64_t begin, int num_heads) {
        const int64_t size = int64_t{num_heads} * head_dim;
        const int64_t start = row * rows.stride + begin;
        double sum = 0;
        for (int64_t i = start; i < start + size; ++i) {
            const float number = rows.is_bfloat16
                ? widened(static_cast<const BFloat16*>(rows.qkv)[i])
                : static_cast<const float*>(rows.qkv)[i];
            sum += double{number} * number;
        }
        return static_cast<float>(sum / static_cast<double>(size));
    };
    ThreadPool::instance().parallel_for(count, [&](int64_t row) {
        out[2 * row] = mean_square(first + row, 0, rows.num_heads);
        const int64_t keys = int64_t{rows.num_heads} * head_dim;
        out[2 * row + 1] = mean_square(first + row, keys, num_kv_heads);
    });
}

void rotate_and_write_checked(nb::handle qkv_object, int64_t num_heads, nb::handle q_norm_object,
    nb::handle k_norm_object, double norm_eps, nb::handle cos_sin_object, nb::handle kv_pool,
    int64_t layer, nb::handle slot_mapping, const char* variant_name) {
    const PoolView pool(kv_pool, layer, Access::kWrite);
    const TensorView qkv(qkv_object, "qkv", Access::kWrite);
    const TensorView cos_sin(cos_sin_object, "cos_sin");
    check_qkv(qkv, cos_sin, num_heads, pool);
    const std::optional<TensorView> q_norm = norm_from(q_norm_object, "q_norm", pool);
    const std::optional<TensorView> k_norm = norm_from(k_norm_object, "k_norm", pool);
    if (q_norm.has_value() != k_norm.has_value()) {
        raise_type_error("k_norm", q_norm ? "a tensor, as q_norm is one" : "None, as q_norm is",
            k_norm ? "a tensor" : "None");
    }
    if (!std::isfinite(norm_eps) || norm_eps < 0) {
        raise_value_error("norm_eps", "a finite number of 0 or more", std::to_string(norm_eps));
    }
    const TensorView slots(slot_mapping, "slot_mapping");
    check_slots(slots, qkv.size(0), pool);
    const Variant variant = variant_from(variant_name);

    Step step{};
    step.num_tokens = qkv.size(0);
    step.slots = slots.data<int64_t>();
    const QkvRows rows{
        .qkv = qkv.data<void>(),
        .is_bfloat16 = qkv.type() == ElementType::kBFloat16,
        .stride = qkv.stride(0),
        .num_heads = static_cast<int>(num_heads),
        .q_norm = q_norm ? q_norm->data<float>() : nullptr,
        .k_norm = k_norm ? k_norm->data<float>() : nullptr,
        .norm_eps = static_cast<float>(norm_eps),
        .cos_sin = cos_sin.data<float>(),
    };
    nb::gil_scoped_release release;
    rotate_and_write(step, pool.pool(), static_cast<int>(layer), rows, variant);
}

}  // namespace pdserve::attention
