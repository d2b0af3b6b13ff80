// The row kernels, once for each instruction set. Each row of the result depends only on its own
// input.

#include "../isa/build_name.h"
#include "../isa/simd.h"
#include "../isa/tanh.h"
#include "kernel.h"

namespace pdserve::rows {

namespace {

constexpr int kSums = 4;  // at once, since one would wait for each addition

float sum_of_squares(const float* row, int64_t size) {
    constexpr int64_t kStep = kSums * kLanes;
    FloatLanes sums[kSums] = {};
    int64_t i = 0;
    for (; i + kStep <= size; i += kStep) {
#pragma GCC unroll 4
        for (int s = 0; s < kSums; ++s) {
            const FloatLanes x = load(row + i + s * kLanes);
            sums[s] = multiply_add(sums[s], x, x);
        }
    }
    for (; i + kLanes <= size; i += kLanes) {
        const FloatLanes x = load(row + i);
        sums[0] = multiply_add(sums[0], x, x);
    }
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; ++i) sum += row[i] * row[i];
    return sum;
}

template <class T>
void normalise(const Norm& norm, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const float* row = norm.x + r * norm.size;
        T* out = static_cast<T*>(norm.out) + r * norm.size;
        const float mean_square = sum_of_squares(row, norm.size) / static_cast<float>(norm.size);
        const float factor = 1.0f / __builtin_sqrtf(mean_square + norm.eps);
        int64_t i = 0;
        for (; i + kLanes <= norm.size; i += kLanes) {
            store(out + i, load(row + i) * splat(factor) * load(norm.weight + i));
        }
        for (; i < norm.size; ++i) assign(out[i], row[i] * factor * norm.weight[i]);
    }
}

void add_norm(const Norm& norm, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const float* row = norm.x + r * norm.size;
        float* out = static_cast<float*>(norm.out) + r * norm.size;
        const float mean_square = sum_of_squares(row, norm.size) / static_cast<float>(norm.size);
        const float factor = 1.0f / __builtin_sqrtf(mean_square + norm.eps);
        int64_t i = 0;
        for (; i + kLanes <= norm.size; i += kLanes) {
            const FloatLanes normed = load(row + i) * splat(factor) * load(norm.weight + i);
            store(out + i, load(out + i) + normed);
        }
        for (; i < norm.size; ++i) out[i] += row[i] * factor * norm.weight[i];
    }
}

template <class T>
void look_up(const Lookup& lookup, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const T* row = static_cast<const T*>(lookup.table) + lookup.ids[r] * lookup.size;
        float* out = lookup.out + r * lookup.size;
        int64_t i = 0;
        for (; i + kLanes <= lookup.size; i += kLanes) store(out + i, load(row + i) * splat(lookup.scale));
        for (; i < lookup.size; ++i) out[i] = to_float(row[i]) * lookup.scale;
    }
}

void cap(const Cap& cap, int64_t first, int64_t last) {
    const SoftCap soft(cap.cap);
    for (int64_t r = first; r < last; ++r) soft.apply(cap.x + r * cap.stride, cap.size);
}

}  // namespace

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {
    normalise<float>, normalise<BFloat16>, add_norm, look_up<float>, look_up<BFloat16>, cap};

}  // namespace pdserve::rows
