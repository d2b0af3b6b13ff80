// The row kernels, once for each instruction set. Each row of the result depends only on its own
// input.

#include "../isa/build_name.h"
#include "../isa/simd.h"
#include "../isa/sigmoid.h"
#include "../isa/tanh.h"
#include "kernel.h"

namespace pdserve::rows {

namespace {

constexpr int kSums = 4;  // at once, since one would wait for each addition

// Of the distances from `mean`.
float sum_of_squares(const float* row, int64_t size, float mean) {
    constexpr int64_t kStep = kSums * kLanes;
    FloatLanes sums[kSums] = {};
    int64_t i = 0;
    for (; i + kStep <= size; i += kStep) {
#pragma GCC unroll 4
        for (int s = 0; s < kSums; ++s) {
            const FloatLanes x = load(row + i + s * kLanes) - splat(mean);
            sums[s] = multiply_add(sums[s], x, x);
        }
    }
    for (; i + kLanes <= size; i += kLanes) {
        const FloatLanes x = load(row + i) - splat(mean);
        sums[0] = multiply_add(sums[0], x, x);
    }
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; ++i) sum += (row[i] - mean) * (row[i] - mean);
    return sum;
}

float mean_of(const float* row, int64_t size) {
    FloatLanes sums = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sums = sums + load(row + i);
    float sum = sum_of(sums);
    for (; i < size; ++i) sum += row[i];
    return sum / static_cast<float>(size);
}

// What a row becomes: (x - mean) * factor * weight.
struct Normed {
    const float* row;
    const float* weight;
    float mean;
    float factor;

    Normed(const Norm& norm, int64_t r) : row(norm.x + r * norm.size), weight(norm.weight) {
        mean = norm.centres ? mean_of(row, norm.size) : 0.0f;
        const float squares = sum_of_squares(row, norm.size, mean);
        const float mean_square = squares / static_cast<float>(norm.size);
        factor = norm.scale / __builtin_sqrtf(mean_square + norm.eps);
    }

    FloatLanes lanes(int64_t i) const {
        return (load(row + i) - splat(mean)) * splat(factor) * load(weight + i);
    }
    float one(int64_t i) const { return (row[i] - mean) * factor * weight[i]; }
};

template <class T>
void normalise(const Norm& norm, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        T* out = static_cast<T*>(norm.out) + r * norm.size;
        const Normed normed(norm, r);
        int64_t i = 0;
        for (; i + kLanes <= norm.size; i += kLanes) store(out + i, normed.lanes(i));
        for (; i < norm.size; ++i) assign(out[i], normed.one(i));
    }
}

void add_norm(const Norm& norm, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        float* out = static_cast<float*>(norm.out) + r * norm.size;
        const Normed normed(norm, r);
        int64_t i = 0;
        for (; i + kLanes <= norm.size; i += kLanes) {
            store(out + i, load(out + i) + normed.lanes(i));
        }
        for (; i < norm.size; ++i) out[i] += normed.one(i);
    }
}

template <class T>
void round_rows(const Norm& norm, int64_t first, int64_t last) {
    const int64_t end = last * norm.size;
    T* out = static_cast<T*>(norm.out);
    int64_t i = first * norm.size;
    for (; i + kLanes <= end; i += kLanes) store(out + i, load(norm.x + i));
    for (; i < end; ++i) assign(out[i], norm.x[i]);
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

template <class T>
void weigh(const Weigh& weigh, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const T* const gates = static_cast<const T*>(weigh.gates) + r * weigh.stride;
        T* const x = static_cast<T*>(weigh.x) + r * weigh.size;
        for (int64_t i = 0; i < weigh.size; i += kLanes) {
            const int64_t count = weigh.size - i < kLanes ? weigh.size - i : kLanes;
            T gate[kLanes] = {}, value[kLanes] = {};
            __builtin_memcpy(gate, gates + i, count * sizeof(T));
            __builtin_memcpy(value, x + i, count * sizeof(T));
            store(value, load(value) * sigmoid_of(load(gate)));
            __builtin_memcpy(x + i, value, count * sizeof(T));
        }
    }
}

}  // namespace

const Kernels PDSERVE_OF_THIS_BUILD(Kernels) = {
    normalise<float>, normalise<BFloat16>, round_rows<float>, round_rows<BFloat16>, add_norm,
    look_up<float>, look_up<BFloat16>, cap, weigh<float>, weigh<BFloat16>};

}  // namespace pdserve::rows
