// How the kernels read packed weights: one unit of a panel at a time, as vectors that x multiplies.
//
// A reader has kSteps vectors-of-a-panel to a unit: one where the unit is a single input, or a pair
// that the CPU multiplies as a pair; two where a pair is widened to float32.
#pragma once

#include "../simd.h"
#include "layout.h"

namespace pdserve::linear {
namespace {

constexpr int kPanelVectors = kPanelOutputs / kLanes;

struct ReadFloat32 {
    using Lanes = FloatLanes;
    using Scalar = float;  // of x
    static constexpr int kSteps = 1;
    static constexpr int kUnitBytes = 64;

    PDSERVE_INLINE static void read(const uint8_t* unit, Lanes (*lanes)[kPanelVectors]) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            lanes[0][v] = load(reinterpret_cast<const float*>(unit) + v * kLanes);
        }
    }
};

struct ReadBFloat16 {
    using Lanes = FloatLanes;
    using Scalar = float;
    static constexpr int kSteps = 2;
    static constexpr int kUnitBytes = 64;

    PDSERVE_INLINE static void read(const uint8_t* unit, Lanes (*lanes)[kPanelVectors]) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const PairLanes pairs = load(reinterpret_cast<const uint32_t*>(unit) + v * kLanes);
            lanes[0][v] = (FloatLanes)(pairs << 16);
            lanes[1][v] = (FloatLanes)(pairs & 0xffff0000u);
        }
    }
};

struct ReadInt8 {
    using Lanes = FloatLanes;
    using Scalar = float;
    static constexpr int kSteps = 2;
    static constexpr int kUnitBytes = 32;

    PDSERVE_INLINE static void read(const uint8_t* unit, Lanes (*lanes)[kPanelVectors]) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const auto halves = load_as<HalfLanes>(unit + v * kLanes * 2);
#if defined(__AVX512F__)
            const auto pairs = (IntLanes)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
            const auto pairs = (IntLanes)_mm256_cvtepu16_epi32((__m128i)halves);
#else
            const auto pairs = __builtin_convertvector(halves, IntLanes);
#endif
            lanes[0][v] = __builtin_convertvector(pairs << 24 >> 24, FloatLanes);
            lanes[1][v] = __builtin_convertvector(pairs << 16 >> 24, FloatLanes);
        }
    }
};

#if defined(__AVX512BF16__)

struct ReadBFloat16Pairs {
    using Lanes = PairLanes;
    using Scalar = uint32_t;
    static constexpr int kSteps = 1;
    static constexpr int kUnitBytes = 64;

    PDSERVE_INLINE static void read(const uint8_t* unit, Lanes (*lanes)[kPanelVectors]) {
        lanes[0][0] = load(reinterpret_cast<const uint32_t*>(unit));
    }
};

// Every int8 is a bfloat16, so the conversion is exact; the scale waits until the sum is done.
struct ReadInt8Pairs {
    using Lanes = PairLanes;
    using Scalar = uint32_t;
    static constexpr int kSteps = 1;
    static constexpr int kUnitBytes = 32;

    PDSERVE_INLINE static void read(const uint8_t* unit, Lanes (*lanes)[kPanelVectors]) {
        const auto widened = [](const uint8_t* bytes) {
            return _mm512_cvtepi32_ps(
                _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
        };
        lanes[0][0] = (PairLanes)_mm512_cvtne2ps_pbh(widened(unit + 16), widened(unit));
    }
};

#endif

}  // namespace
}  // namespace pdserve::linear
