// What becomes of finished sums: scale, bias, and one of the Results.
#pragma once

#include "kernel.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

// x / (1 + exp(-x)). The exponent is never above 0, so nothing overflows.
PDSERVE_INLINE FloatLanes silu(FloatLanes x) {
    const FloatLanes magnitude = x < splat(0.0f) ? -x : x;
    const FloatLanes decay = exp2_of_nonpositive(magnitude * splat(-1.44269504088896341f));
    const FloatLanes numerator = x < splat(0.0f) ? x * decay : x;
    return numerator / (splat(1.0f) + decay);
}

PDSERVE_INLINE FloatLanes as_stored(FloatLanes lanes, float) { return lanes; }

// Rounds as assign() does.
PDSERVE_INLINE HalfLanes as_stored(FloatLanes lanes, BFloat16) {
    const auto bits = (PairLanes)lanes;
    const PairLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const auto is_nan = (PairLanes)(lanes != lanes);
    const PairLanes halves = (is_nan & 0x7fc0) | (~is_nan & rounded);
#if defined(__AVX512F__)
    return (HalfLanes)_mm512_cvtepi32_epi16((__m512i)halves);
#else
    return __builtin_convertvector(halves, HalfLanes);
#endif
}

// The first `count` lanes.
template <class T>
PDSERVE_INLINE void put(T* target, FloatLanes lanes, int64_t count) {
    const auto stored = as_stored(lanes, T{});
    if (count >= kLanes) {
        store(target, stored);
    } else if (count > 0) {
        T values[kLanes];
        store(values, stored);
        __builtin_memcpy(target, values, count * sizeof(T));
    }
}

class Finish {
public:
    explicit Finish(const Call& call) : call_(call) {}

    // sums: [num_rows][kGroupOutputs], of the group's panels, of the rows from first_row on.
    void run(float* sums, int64_t first_row, int num_rows, int64_t group) const {
        for (int r = 0; r < num_rows; ++r) {
            float* row = sums + r * kGroupOutputs;
            scale_and_bias(row, group);
            const int64_t out_row = (first_row + r) * call_.out_stride;
            switch (call_.result) {
                case Result::kStore:
                    if (call_.is_bfloat16) {
                        put_group(static_cast<BFloat16*>(call_.out) + out_row, row, group);
                    } else {
                        put_group(static_cast<float*>(call_.out) + out_row, row, group);
                    }
                    break;
                case Result::kStoreFloat:
                    put_group(static_cast<float*>(call_.out) + out_row, row, group);
                    break;
                case Result::kAdd:
                    add_group(static_cast<float*>(call_.out) + out_row, row, group);
                    break;
                case Result::kGatedSilu:
                    if (call_.is_bfloat16) {
                        put_gated(static_cast<BFloat16*>(call_.out) + out_row, row, group);
                    } else {
                        put_gated(static_cast<float*>(call_.out) + out_row, row, group);
                    }
                    break;
            }
        }
    }

private:
    // The last group may have one panel only; the other's sums are not looked at.
    int num_outputs(int64_t group) const {
        const int64_t left = call_.layout.num_panels - group * kGroupPanels;
        return static_cast<int>(left < kGroupPanels ? left : kGroupPanels) * kPanelOutputs;
    }

    void scale_and_bias(float* row, int64_t group) const {
        const int64_t first = group * kGroupOutputs;
        const int count = num_outputs(group);
        if (call_.scales != nullptr) {
            for (int i = 0; i < count; i += kLanes) {
                store(row + i, load(row + i) * load(call_.scales + first + i));
            }
        }
        if (call_.bias != nullptr) {
            for (int i = 0; i < count; i += kLanes) {
                store(row + i, load(row + i) + load(call_.bias + first + i));
            }
        }
    }

    template <class T>
    void put_group(T* out, const float* row, int64_t group) const {
        const int64_t first = group * kGroupOutputs;
        const int count = num_outputs(group);
        for (int i = 0; i < count; i += kLanes) {
            put(out + first + i, load(row + i), call_.num_columns - first - i);
        }
    }

    void add_group(float* out, float* row, int64_t group) const {
        const int64_t first = group * kGroupOutputs;
        const int count = num_outputs(group);
        for (int i = 0; i < count; i += kLanes) {
            float* target = out + first + i;
            const int64_t left = call_.num_columns - first - i;
            if (left >= kLanes) {
                store(target, load(target) + load(row + i));
            } else {
                for (int j = 0; j < left; ++j) target[j] += row[i + j];
            }
        }
    }

    template <class T>
    void put_gated(T* out, const float* row, int64_t group) const {
        const int64_t first = group * kPanelOutputs;
        for (int i = 0; i < kPanelOutputs; i += kLanes) {
            const FloatLanes gated = silu(load(row + i)) * load(row + kPanelOutputs + i);
            put(out + first + i, gated, call_.num_columns - first - i);
        }
    }

    const Call& call_;
};

}  // namespace
}  // namespace pdserve::linear
