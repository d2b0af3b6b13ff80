// Reads packed weights: one unit of a panel at a time, as vectors to be multiplied by x.
//
// A reader reads a unit in kSteps steps. A step is one input, widened to float32 if necessary, or a
// pair of inputs if the CPU multiplies pairs.
#pragma once

#include "../../isa/fp8.h"
#include "../../isa/simd.h"
#include "../layout.h"

namespace pdserve::linear {
namespace {

constexpr int kPanelVectors = kPanelOutputs / kLanes;

struct ReadFloat32 {
    using Lanes = FloatLanes;
    using Scalar = float;  // of x
    static constexpr int kSteps = 1;

    PDSERVE_INLINE static void read(const uint8_t* unit, int, Lanes* lanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            lanes[v] = load(reinterpret_cast<const float*>(unit) + v * kLanes);
        }
    }
};

struct ReadBFloat16 {
    using Lanes = FloatLanes;
    using Scalar = float;
    static constexpr int kSteps = 2;

    PDSERVE_INLINE static void read(const uint8_t* unit, int step, Lanes* lanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const PairLanes pairs = load(reinterpret_cast<const uint32_t*>(unit) + v * kLanes);
            lanes[v] = (FloatLanes)(step == 0 ? pairs << 16 : pairs & 0xffff0000u);
        }
    }
};

// What bytes of weights stand for, in the lowest byte of each lane: numbers that are bfloat16
// exactly. Scales are applied to the finished sum.
template <WeightType kType>
PDSERVE_INLINE FloatLanes number_of(PairLanes bytes) {
    if constexpr (kType == WeightType::kFp8) {
        return numbers_of_fp8(bytes);
    } else {
        static_assert(kType == WeightType::kInt8);
        return __builtin_convertvector((IntLanes)bytes - kInt8Zero, FloatLanes);
    }
}

template <WeightType kType>
struct ReadBytes {
    using Lanes = FloatLanes;
    using Scalar = float;
    static constexpr int kSteps = 4;

    PDSERVE_INLINE static void read(const uint8_t* unit, int step, Lanes* lanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const auto inputs = load_as<PairLanes>(unit + v * kLanes * 4);
            lanes[v] = number_of<kType>(inputs >> (8 * step) & 0xff);
        }
    }
};

// The reader for panels that another reader has widened, one unit per step.
template <class Scalar>
struct OneStep {
    using Reader = ReadFloat32;
};

#if defined(PDSERVE_HAS_PAIRS)

struct ReadBFloat16Pairs {
    using Lanes = PairLanes;
    using Scalar = uint32_t;
    static constexpr int kSteps = 1;

    PDSERVE_INLINE static void read(const uint8_t* unit, int, Lanes* lanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            lanes[v] = load(reinterpret_cast<const uint32_t*>(unit) + v * kLanes);
        }
    }
};

template <WeightType kType>
struct ReadBytePairs {
    using Lanes = PairLanes;
    using Scalar = uint32_t;
    static constexpr int kSteps = 2;

    PDSERVE_INLINE static void read(const uint8_t* unit, int step, Lanes* lanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            FloatLanes inputs[2][kPanelVectors];
            ReadBytes<kType>::read(unit, 2 * step, inputs[0]);
            ReadBytes<kType>::read(unit, 2 * step + 1, inputs[1]);
            lanes[v] = (PairLanes)inputs[0][v] >> 16 | (PairLanes)inputs[1][v];
        }
    }
};

template <>
struct OneStep<uint32_t> {
    using Reader = ReadBFloat16Pairs;
};

#endif

}  // namespace
}  // namespace pdserve::linear
