// Widens panels of codes to panels of float32 or bfloat16, which the products then read.
//
// If there are minimums, products of codes and scales are exact in float32, so that it does not
// matter whether they are fused with the subtraction: all builds make the same weights.
#pragma once

#include "../../isa/simd.h"
#include "../coding.h"
#include "kernel.h"
#include "weights.h"

namespace pdserve::linear {
namespace {

constexpr int kHalfBlock = kBlockInputs / 2;  // the inputs that certainly share a scale

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
    return halves_to_float((PairLanes)_mm512_cvtepu16_epi32((__m256i)halves));
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
PDSERVE_INLINE PanelNumbers numbers_at(const CodedPanels& panels, const uint8_t* panel,
    int64_t numbers, int64_t supers, int64_t input) {
    const Coding& coding = panels.coding;
    const uint8_t* row =
        panel + numbers + input / coding.group * kPanelOutputs * panels.layout.scale_bytes;
    const uint8_t* super = panel + supers + input / kSuperInputs * kPanelOutputs * 2;
    PanelNumbers found;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
        switch (coding.scale) {
            case ScaleType::kFloat16: found.of[v] = load_halves(row + v * kLanes * 2); break;
            case ScaleType::kFloat32: found.of[v] = load_as<FloatLanes>(row + v * kLanes * 4); break;
            case ScaleType::kTwoLevels: {
                const IntLanes bytes = load_bytes(row + v * kLanes) << 24 >> 24;
                found.of[v] = load_halves(super + v * kLanes * 2)
                    * __builtin_convertvector(bytes, FloatLanes);
                break;
            }
        }
    }
    return found;
}

// Some outputs' codes of two inputs: k, which is even, of a half block, and the next.
template <int kBits>
PDSERVE_INLINE void read_codes(const uint8_t* block, int half, int k, int v, IntLanes* codes) {
    if constexpr (kBits == 8) {
        const uint8_t* row = block + (half * kHalfBlock + k) * kPanelOutputs + v * kLanes;
        codes[0] = load_bytes(row);
        codes[1] = load_bytes(row + kPanelOutputs);
        return;
    }
    const IntLanes both =
        load_bytes(block + (half * kHalfBlock + k) / 2 * kPanelOutputs + v * kLanes);
    codes[0] = both & 15;
    codes[1] = both >> 4;
    if constexpr (kBits == 4 || kBits == 8) return;
    constexpr int kUpper = kBits == 5 ? 1 : 2;
    constexpr int kMask = (1 << kUpper) - 1;
    const int word = kUpper == 2 ? half : 0;
    const int shift = kUpper == 2 ? k * 2 : half * kHalfBlock + k;
    const uint8_t* words = block + kHalfBlock * kPanelOutputs;
    const auto bits =
        load_as<PairLanes>(words + (word * kPanelOutputs + v * kLanes) * sizeof(uint32_t)) >> shift;
    codes[0] |= (IntLanes)((bits & kMask) << 4);
    codes[1] |= (IntLanes)(((bits >> kUpper) & kMask) << 4);
}

// To the nearest float16, ties to even; below 2**-14 to a multiple of the smallest, 2**-24. (No weight
// is as large as its largest.)
PDSERVE_INLINE FloatLanes rounded_to_half(FloatLanes lanes) {
    const auto bits = (PairLanes)lanes;
    const PairLanes usual = (bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000u;
    const auto magnitude = (FloatLanes)(bits & 0x7fffffff);
    const FloatLanes small = (magnitude + splat(0.75f)) - splat(0.75f);
    const PairLanes tiny = (PairLanes)small | (bits & 0x80000000u);
    return (FloatLanes)(magnitude < splat(0x1p-14f) ? tiny : usual);
}

// As assign() rounds to bfloat16, in the upper half.
PDSERVE_INLINE PairLanes rounded_halves(FloatLanes lanes) {
    const auto bits = (PairLanes)lanes;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

PDSERVE_INLINE FloatLanes rounded(FloatLanes lanes, Rounding to) {
    return to == Rounding::kFloat16 ? rounded_to_half(lanes)
                                    : (FloatLanes)(rounded_halves(lanes) & 0xffff0000u);
}

template <int kBits, bool kHasMinimums, bool kRounds, bool kToBFloat16>
void widen_panel(const CodedPanels& panels, const uint8_t* panel, uint8_t* target) {
    const CodedLayout& layout = panels.layout;
    const IntLanes zero = panels.coding.zero - IntLanes{};
    [[maybe_unused]] const Rounding rounding = panels.coding.rounding;
    for (int64_t first = 0; first < panels.num_in; first += kHalfBlock) {
        const uint8_t* block = panel + first / kBlockInputs * layout.block_bytes;
        const int half = first / kHalfBlock % 2;
        const PanelNumbers scales =
            numbers_at(panels, panel, layout.scales, layout.super_scales, first);
        PanelNumbers minimums{};
        if constexpr (kHasMinimums) {
            minimums = numbers_at(panels, panel, layout.minimums, layout.super_minimums, first);
        }
#pragma GCC unroll 8
        for (int k = 0; k < kHalfBlock; k += 2) {
#pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; ++v) {
                IntLanes codes[2];
                read_codes<kBits>(block, half, k, v, codes);
                FloatLanes weights[2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    weights[i] = __builtin_convertvector(codes[i] - zero, FloatLanes);
                    weights[i] = weights[i] * scales.of[v];
                    if constexpr (kHasMinimums) weights[i] = weights[i] - minimums.of[v];
                    if constexpr (kRounds) weights[i] = rounded(weights[i], rounding);
                }
                uint8_t* lanes = target + v * kLanes * 4;
                if constexpr (kToBFloat16) {
                    const PairLanes upper = rounded_halves(weights[1]) & 0xffff0000u;
                    store(lanes, upper | rounded_halves(weights[0]) >> 16);
                } else {
                    store(lanes, weights[0]);
                    store(lanes + kUnitBytes, weights[1]);
                }
            }
            target += kToBFloat16 ? kUnitBytes : 2 * kUnitBytes;
        }
    }
}

template <int kBits, bool kHasMinimums, bool kRounds>
void widen_panels(const CodedPanels& panels) {
    for (int p = 0; p < panels.num_panels; ++p) {
        const uint8_t* panel = panels.start + p * panels.layout.panel_bytes;
        uint8_t* target = panels.target + p * panels.target_panel_bytes;
        if (panels.to_bfloat16) {
            widen_panel<kBits, kHasMinimums, kRounds, true>(panels, panel, target);
        } else {
            widen_panel<kBits, kHasMinimums, kRounds, false>(panels, panel, target);
        }
    }
}

template <int kBits, bool kHasMinimums>
void widen_rounded(const CodedPanels& panels) {
    panels.coding.rounding != Rounding::kNone ? widen_panels<kBits, kHasMinimums, true>(panels)
                                              : widen_panels<kBits, kHasMinimums, false>(panels);
}

template <int kBits>
void widen_bits(const CodedPanels& panels) {
    panels.coding.has_minimums ? widen_rounded<kBits, true>(panels)
                               : widen_rounded<kBits, false>(panels);
}

void widen_codes(const CodedPanels& panels) {
    switch (panels.coding.bits) {
        case 4: return widen_bits<4>(panels);
        case 5: return widen_bits<5>(panels);
        case 6: return widen_bits<6>(panels);
        default: return widen_bits<8>(panels);
    }
}

}  // namespace
}  // namespace pdserve::linear
