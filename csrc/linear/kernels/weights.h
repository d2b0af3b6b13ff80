// Reads packed weights: one unit of a panel at a time, as vectors to be multiplied by x.
//
// A reader reads a unit in kSteps steps. A step is one input, widened to float32 if necessary, or a
// pair of inputs if the CPU multiplies pairs.
#pragma once

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

struct ReadInt8 {
    using Lanes = FloatLanes;
    using Scalar = float;
    static constexpr int kSteps = 4;

    PDSERVE_INLINE static void read(const uint8_t* unit, int step, Lanes* lanes) {
        const uint8_t* start = unit + step / 2 * kPanelOutputs * 2;
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const auto halves = load_as<HalfLanes>(start + v * kLanes * 2);
#if defined(__AVX512F__)
            const auto pairs = (IntLanes)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
            const auto pairs = (IntLanes)_mm256_cvtepu16_epi32((__m128i)halves);
#else
            const auto pairs = __builtin_convertvector(halves, IntLanes);
#endif
            const IntLanes bytes = pairs << (step % 2 == 0 ? 24 : 16) >> 24;
            lanes[v] = __builtin_convertvector(bytes, FloatLanes);
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

// Every int8 is exactly a bfloat16; the scale is applied to the finished sum. (A table lookup with
// VBMI is no faster.)
struct ReadInt8Pairs {
    using Lanes = PairLanes;
    using Scalar = uint32_t;
    static constexpr int kSteps = 2;

    PDSERVE_INLINE static void read(const uint8_t* unit, int step, Lanes* lanes) {
#if defined(__AVX512BF16__)
        const auto* bytes = reinterpret_cast<const __m128i*>(unit) + step * 2;
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
        lanes[0] = to_pairs((FloatLanes)low, (FloatLanes)high);
#else
        const uint8_t* start = unit + step * kPanelOutputs * 2;
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const int16x8_t wide = vmovl_s8(load_as<int8x8_t>(start + v * kLanes * 2));
            const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
            const float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(wide));
            lanes[v] = to_pairs((FloatLanes)low, (FloatLanes)high);
        }
#endif
    }
};

template <>
struct OneStep<uint32_t> {
    using Reader = ReadBFloat16Pairs;
};

#endif

}  // namespace
}  // namespace pdserve::linear
