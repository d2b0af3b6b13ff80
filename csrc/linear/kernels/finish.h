// The end of a product: scale, bias, and storing as one of the Results.
#pragma once

#include "expand.h"
#include "kernel.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

// x / (1 + exp(-z)). The exponent is never above 0, so nothing overflows.
PDSERVE_INLINE FloatLanes times_sigmoid(FloatLanes x, FloatLanes z) {
    const FloatLanes magnitude = z < splat(0.0f) ? -z : z;
    const FloatLanes decay = exp2_of_nonpositive(magnitude * splat(-1.44269504088896341f));
    const FloatLanes numerator = z < splat(0.0f) ? x * decay : x;
    return numerator / (splat(1.0f) + decay);
}

struct Silu {
    PDSERVE_INLINE FloatLanes operator()(FloatLanes gate, FloatLanes up) const {
        return times_sigmoid(gate, gate) * up;
    }
};

// x * (1 + tanh(z / 2)) / 2 with z = sqrt(8 / pi) * (x + 0.044715 * x^3).
struct Gelu {
    PDSERVE_INLINE FloatLanes operator()(FloatLanes gate, FloatLanes up) const {
        const FloatLanes cubed = multiply_add(gate, gate * gate * gate, splat(0.044715f));
        return times_sigmoid(gate, cubed * splat(1.59576912160573071f)) * up;
    }
};

// gpt-oss: the gate is clamped from above, up from both sides. NaN stays NaN.
struct Clamped {
    PDSERVE_INLINE FloatLanes operator()(FloatLanes gate, FloatLanes up) const {
        const FloatLanes most = splat(7.0f);
        gate = gate > most ? most : gate;
        up = up > most ? most : up < -most ? -most : up;
        return times_sigmoid(gate, gate * splat(1.702f)) * (up + splat(1.0f));
    }
};

// The first `count` lanes, rounded to T.
template <class T>
PDSERVE_INLINE void put(T* target, FloatLanes lanes, int64_t count) {
    if (count >= kLanes) {
        store(target, lanes);
    } else if (count > 0) {
        T values[kLanes];
        store(values, lanes);
        __builtin_memcpy(target, values, count * sizeof(T));
    }
}

// Writes the part of a result that belongs to one chunk of panels. The loop over rows is innermost,
// so that the CPU can overlap them.
class Finish {
public:
    explicit Finish(const Call& call) : call_(call) {}

    // sums: rows `sum_stride` apart, for the panels of the chunk and the rows from first_row on.
    void run(float* sums, int64_t sum_stride, int64_t first_row, int64_t num_rows,
        int64_t first_panel, int num_panels) const {
        const int64_t first_lane = first_panel * kPanelOutputs;
        const SumPart part{
            sums, sum_stride, first_row, num_rows, first_lane, num_panels * kPanelOutputs};
        if (call_.scales != nullptr && call_.scale_stride == 0) {
            change(part, call_.scales, [](FloatLanes y, FloatLanes scale) { return y * scale; });
        }
        if (call_.delta.expansions != nullptr) expand(call_.delta, part);
        if (call_.bias != nullptr) {
            change(part, call_.bias, [](FloatLanes y, FloatLanes bias) { return y + bias; });
        }
        switch (call_.result) {
            case Result::kStore:
                call_.is_bfloat16 ? put_all<BFloat16>(part) : put_all<float>(part);
                break;
            case Result::kStoreFloat: put_all<float>(part); break;
            case Result::kAdd: add_all(part); break;
            case Result::kGatedSilu: put_gated(part, Silu()); break;
            case Result::kGatedGelu: put_gated(part, Gelu()); break;
            case Result::kGatedClamped: put_gated(part, Clamped()); break;
        }
    }

private:
    template <class T>
    T* out_row(const SumPart& part, int64_t row) const {
        return static_cast<T*>(call_.out) + (part.first_row + row) * call_.out_stride;
    }

    template <class Change>
    static void change(const SumPart& part, const float* factors, const Change& change) {
        for (int i = 0; i < part.num_lanes; i += kLanes) {
            const FloatLanes factor = load(factors + part.first_lane + i);
            for (int64_t r = 0; r < part.num_rows; ++r) {
                float* y = part.sums + r * part.sum_stride + i;
                store(y, change(load(y), factor));
            }
        }
    }

    template <class T>
    void put_all(const SumPart& part) const {
        for (int i = 0; i < part.num_lanes; i += kLanes) {
            const int64_t column = part.first_lane + i;
            for (int64_t r = 0; r < part.num_rows; ++r) {
                const FloatLanes y = load(part.sums + r * part.sum_stride + i);
                put(out_row<T>(part, r) + column, y, call_.num_columns - column);
            }
        }
    }

    void add_all(const SumPart& part) const {
        for (int i = 0; i < part.num_lanes; i += kLanes) {
            const int64_t column = part.first_lane + i;
            const int64_t left = call_.num_columns - column;
            for (int64_t r = 0; r < part.num_rows; ++r) {
                const float* y = part.sums + r * part.sum_stride + i;
                float* target = out_row<float>(part, r) + column;
                if (left >= kLanes) {
                    store(target, load(target) + load(y));
                } else {
                    for (int j = 0; j < left; ++j) target[j] += y[j];
                }
            }
        }
    }

    template <class Activation>
    void put_gated(const SumPart& part, Activation activation) const {
        call_.is_bfloat16 ? put_gated<BFloat16>(part, activation)
                          : put_gated<float>(part, activation);
    }

    // Gated: a pair of panels (gate, up) becomes the columns of one panel.
    template <class T, class Activation>
    void put_gated(const SumPart& part, Activation activation) const {
        for (int i = 0; i < part.num_lanes / 2; i += kLanes) {
            const int gate = i / kPanelOutputs * 2 * kPanelOutputs + i % kPanelOutputs;
            const int64_t column = part.first_lane / 2 + i;
            for (int64_t r = 0; r < part.num_rows; ++r) {
                const float* y = part.sums + r * part.sum_stride + gate;
                const FloatLanes gated = activation(load(y), load(y + kPanelOutputs));
                put(out_row<T>(part, r) + column, gated, call_.num_columns - column);
            }
        }
    }

    const Call& call_;
};

}  // namespace
}  // namespace pdserve::linear
