// Reads panels of codes (../coding.h): codes of some inputs of some outputs, and their scales.
#pragma once

#include "../../isa/simd.h"
#include "../coding.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

constexpr int kHalfBlock = kBlockInputs / 2;  // the inputs that certainly share a scale of weights
constexpr int kBlockUnits = kBlockInputs / 4;
constexpr int kHalfUnits = kBlockUnits / 2;
constexpr int64_t kNestedAhead = 8192;  // how far, in bytes, such codes are fetched before their use

PDSERVE_INLINE IntLanes load_bytes(const uint8_t* source) {
#if defined(__AVX512F__)
    return (IntLanes)_mm512_cvtepu8_epi32(load_as<__m128i>(source));
#elif defined(__AVX2__)
    return (IntLanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#else
    typedef uint8_t ByteLanes __attribute__((vector_size(kLanes)));
    return __builtin_convertvector(load_as<ByteLanes>(source), IntLanes);
#endif
}

PDSERVE_INLINE FloatLanes load_halves(const uint8_t* source) {
    const auto halves = load_as<HalfLanes>(source);
#if defined(__AVX512F__)
    return (FloatLanes)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__)
    return halves_to_float((PairLanes)_mm256_cvtepu16_epi32((__m128i)halves));
#else
    return halves_to_float(__builtin_convertvector(halves, PairLanes));
#endif
}

struct PanelNumbers {
    FloatLanes of[kPanelVectors];
};

// The scales of a group, or its minimums.
PDSERVE_INLINE PanelNumbers numbers_at(const Coding& coding, const CodedLayout& layout,
    const uint8_t* panel, int64_t numbers, int64_t supers, int64_t group) {
    const uint8_t* row = panel + numbers + group * kPanelOutputs * layout.scale_bytes;
    const uint8_t* super =
        panel + supers + group * coding.group / kSuperInputs * kPanelOutputs * 2;
    PanelNumbers found;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
        switch (coding.scale) {
            case ScaleType::kFloat16: found.of[v] = load_halves(row + v * kLanes * 2); break;
            case ScaleType::kFloat32: found.of[v] = load_as<FloatLanes>(row + v * kLanes * 4); break;
            case ScaleType::kTwoLevels:
            case ScaleType::kNested: {
                const IntLanes bytes = load_bytes(row + v * kLanes) << 24 >> 24;
                found.of[v] = load_halves(super + v * kLanes * 2)
                    * __builtin_convertvector(bytes, FloatLanes);
                break;
            }
        }
    }
    return found;
}

// Unit u of a block, of vector v of a panel: codes of 4 inputs of an output in a lane, a byte each.
template <int kBits>
PDSERVE_INLINE PairLanes unit_at(const uint8_t* block, int u, int v) {
    const uint8_t* start = block + v * kLanes * 4;
    if constexpr (kBits == 8) return load_as<PairLanes>(start + u * kUnitBytes);
    const int half = u / kHalfUnits, at = u % kHalfUnits;
    const PairLanes lower = load_as<PairLanes>(start + at * kUnitBytes) >> (4 * half) & 0x0f0f0f0fu;
    if constexpr (kBits == 4 || kBits == 8) return lower;
    constexpr int kUpper = kBits == 5 ? 1 : 2;
    constexpr uint32_t kMask = kUpper == 1 ? 0x01010101u : 0x03030303u;
    const int line = kHalfUnits + (kUpper == 2 ? half : 0);
    const int shift = kUpper == 1 ? u : at * kUpper;
    return lower | (load_as<PairLanes>(start + line * kUnitBytes) >> shift & kMask) << 4;
}

// What makes bytes of nested codes, of a group and of vector v: scale * code - minimum, greater by 128.
class Nesting {
public:
    PDSERVE_INLINE Nesting() = default;
    PDSERVE_INLINE Nesting(const uint8_t* scales, const uint8_t* minimums, int v) {
        const auto scale = (PairLanes)load_bytes(scales + v * kLanes);
        const auto minimum = (PairLanes)load_bytes(minimums + v * kLanes);
        scales_ = (Words)(scale | scale << 16);
        const PairLanes twice = minimum | minimum << 8;
        starts_ = (Bytes)splat(uint32_t{0x80808080}) - (Bytes)(twice | twice << 16);
    }

    // No product is above 255.
    PDSERVE_INLINE PairLanes bytes_of(PairLanes codes) const {
        return (PairLanes)((Bytes)((Words)codes * scales_) + starts_);
    }

private:
    typedef uint16_t Words __attribute__((vector_size(kLanes * 4)));
    typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));

    Words scales_;
    Bytes starts_;
};

// What 256 inputs of a panel share, as float32.
[[maybe_unused]] void put_super_scales(
    const CodedLayout& layout, const uint8_t* panel, float* target) {
    const uint8_t* source = panel + layout.super_scales;
    for (int64_t i = 0; i < layout.num_supers * kPanelOutputs; i += kLanes) {
        store(target + i, load_halves(source + 2 * i));
    }
}

// Bytes of all units of a panel of nested codes.
[[maybe_unused]] void widen_nested(
    const CodedLayout& layout, const uint8_t* panel, int64_t num_blocks, uint8_t* target) {
    const uint8_t* block = panel + layout.codes;
    for (int64_t b = 0; b < num_blocks; ++b, block += layout.block_bytes) {
        prefetch(block + kNestedAhead, static_cast<int>(layout.block_bytes));
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const Nesting nesting(panel + layout.scales + b * kPanelOutputs,
                panel + layout.minimums + b * kPanelOutputs, v);
#pragma GCC unroll 8
            for (int u = 0; u < kBlockUnits; ++u) {
                store(target + u * kUnitBytes + v * kLanes * 4,
                    nesting.bytes_of(unit_at<4>(block, u, v)));
            }
        }
        target += kBlockUnits * kUnitBytes;
    }
}

}  // namespace
}  // namespace pdserve::linear
