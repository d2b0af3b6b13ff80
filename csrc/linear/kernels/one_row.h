// One row of x by panels, as tiles compute it (isa/amx.h), but with vectors, which stream weights
// faster: of each tile the even and the odd inputs are one chain of fused multiply-adds each, and
// the sum of the two is added to what came before. So the bits are those of any number of rows.
#pragma once

#include "../../isa/amx.h"
#include "weights.h"

#if defined(__AMX_BF16__)

namespace pdserve::linear {
namespace {

// Tiles take denormals for zeros and make none, whatever the thread's settings are.
class WithoutDenormals {
public:
    WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~WithoutDenormals() { _mm_setcsr(before_); }
    WithoutDenormals(const WithoutDenormals&) = delete;
    WithoutDenormals& operator=(const WithoutDenormals&) = delete;

private:
    const unsigned before_;
};

struct Halves {
    FloatLanes even;
    FloatLanes odd;
};

PDSERVE_INLINE Halves halves_of(PairLanes pairs) {
    return {(FloatLanes)(pairs << 16), (FloatLanes)(pairs & 0xffff0000u)};
}

// Two inputs of 16 outputs: pair `i` of a panel.
template <WeightType kType>
PDSERVE_INLINE Halves weights_at(const uint8_t* panel, int64_t i) {
    PairLanes lanes[1];
    if constexpr (traits_of(kType).unit_inputs == 4) {
        ReadBytePairs<kType>::read(panel + i / 2 * kUnitBytes, i % 2, lanes);
    } else {
        ReadBFloat16Pairs::read(panel + i * kUnitBytes, 0, lanes);
    }
    return halves_of(lanes[0]);
}

constexpr int kPairsInTile = 16;
constexpr int kRowAhead = 1024;  // bytes of a panel

// sums[p * 16 + i] = x . output i of panel p. The row is the first of tiles of x.
template <WeightType kType, int kPanels>
PDSERVE_INLINE void multiply_row(
    const uint8_t* x, const uint8_t* panels, const Layout& layout, float* sums) {
    constexpr int kPairBytes = kUnitBytes * 2 / traits_of(kType).unit_inputs;
    const int64_t num_pairs = layout.panel_bytes / kPairBytes;
    const WithoutDenormals without_denormals;
    FloatLanes totals[kPanels] = {};
    for (int64_t first = 0; first < num_pairs; first += kPairsInTile, x += kTileBytes) {
        const int64_t left = num_pairs - first;
        const int num = left < kPairsInTile ? static_cast<int>(left) : kPairsInTile;
        FloatLanes even[kPanels] = {}, odd[kPanels] = {};
        for (int i = 0; i < num; ++i) {
            uint32_t pair;
            __builtin_memcpy(&pair, x + i * sizeof(pair), sizeof(pair));
            const Halves inputs = halves_of(splat(pair));
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                const uint8_t* panel = panels + p * layout.panel_bytes;
                prefetch(panel + (first + i) * kPairBytes + kRowAhead, 1);
                const Halves weights = weights_at<kType>(panel, first + i);
                even[p] = multiply_add(even[p], inputs.even, weights.even);
                odd[p] = multiply_add(odd[p], inputs.odd, weights.odd);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) totals[p] += even[p] + odd[p];
    }
    for (int p = 0; p < kPanels; ++p) store(sums + p * kPanelOutputs, totals[p]);
}

}  // namespace
}  // namespace pdserve::linear

#endif
