#include "form.h"

#include <algorithm>

#include "../isa/build_name.h"

namespace pdserve::linear {

namespace {

// Number of rows that use a chunk of panels while it is in the L2 cache.
constexpr int64_t kMostRows = 192;

// The tiles of an item's rows: what the L2 cache holds beside the weights.
constexpr int64_t kMostTileBytes = 800 << 10;

// Number of rows that a thread converts at a time.
constexpr int64_t kConvertRows = 32;

int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

const TileKernels* tile_kernels(Variant variant) {
#if defined(__x86_64__)
    if (variant == Variant::kAmx) return &kAmxTileKernels;
    if (variant == Variant::kAmxEmulated) return &kAmxEmulatedTileKernels;
#else
    (void)variant;
#endif
    return nullptr;
}

Form tiled(const Product& product, const TileKernels& kernels) {
    const bool is_int8 = product.matrix->type == WeightType::kInt8;
    const int64_t num_inputs = round_up(product.matrix->num_in, kTileInputs);
    const int64_t row_bytes = num_inputs * 2;
    const int64_t fitting = kMostTileBytes / row_bytes / (2 * kTileRows) * 2 * kTileRows;
    return {
        .multiply = is_int8 ? kernels.int8 : kernels.bfloat16,
        .convert = kernels.tile_rows,
        .is_in_place = false,
        .element_bytes = 2,
        .num_inputs = num_inputs,
        .rows_together = kTileRows,
        .most_rows = std::clamp(fitting, 4 * kTileRows, kMostTileRows),
        .scratch_bytes = kMaxChunkPanels * kPanelOutputs * (is_int8 ? row_bytes : 2 * kTileInputs),
    };
}

// `weight_bytes`: what an item needs for each weight of a chunk that it widens.
Form by_rows(const Product& product, const Layout& layout, MultiplyFunction multiply,
    ConvertFunction convert, bool is_in_place, int64_t element_bytes, int64_t weight_bytes) {
    const int64_t num_inputs = layout.num_units * layout.unit_inputs;
    return {
        .multiply = multiply,
        .convert = convert,
        .is_in_place = is_in_place && product.matrix->num_in == num_inputs,
        .element_bytes = element_bytes,
        .num_inputs = num_inputs,
        .rows_together = kConvertRows,
        .most_rows = kMostRows,
        .scratch_bytes = kMaxChunkPanels * kPanelOutputs * num_inputs * weight_bytes,
    };
}

}  // namespace

Form form_of(const Product& product, const Layout& layout, Variant variant) {
    const WeightType type = product.matrix->type;
    const ProductKernels& kernels = PDSERVE_OF_VARIANT(variant, ProductKernels);
    if (product.is_bfloat16 && type != WeightType::kFloat32) {
        if (const TileKernels* tiles = tile_kernels(variant)) return tiled(product, *tiles);
        if (kernels.has_pairs) {
            return type == WeightType::kInt8
                ? by_rows(product, layout, kernels.int8_by_pairs, kernels.pad_pairs, true, 2, 2)
                : by_rows(
                    product, layout, kernels.bfloat16_by_pairs, kernels.pad_pairs, true, 2, 0);
        }
    }
    const MultiplyFunction multiply = type == WeightType::kInt8 ? kernels.int8_by_float32
        : type == WeightType::kBFloat16                         ? kernels.bfloat16_by_float32
                                                                : kernels.float32_by_float32;
    const ConvertFunction convert =
        product.is_bfloat16 ? kernels.widen_bfloat16 : kernels.widen_float32;
    return by_rows(product, layout, multiply, convert, !product.is_bfloat16, 4,
        type == WeightType::kFloat32 ? 0 : 4);
}

}  // namespace pdserve::linear
