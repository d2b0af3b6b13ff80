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

Form tiled(const Product& product, const Layout& layout, MultiplyFunction multiply,
    ConvertFunction convert) {
    const int64_t num_inputs = round_up(product.matrix->num_in, kTileInputs);
    const int64_t row_bytes = num_inputs * 2;
    const int64_t fitting = kMostTileBytes / row_bytes / (2 * kTileRows) * 2 * kTileRows;
    const bool is_widened = layout.unit_inputs > 2;  // else units are rows of tiles
    return {
        .multiply = multiply,
        .convert = convert,
        .is_in_place = false,
        .element_bytes = 2,
        .num_inputs = num_inputs,
        .rows_together = kTileRows,
        .most_rows = std::clamp(fitting, 4 * kTileRows, kMostTileRows),
        .scratch_bytes =
            kMaxChunkPanels * kPanelOutputs * (is_widened ? row_bytes : 2 * kTileInputs),
        .widen = nullptr,
    };
}

// `step_inputs`: of an output, that the kernels read in a step. With several steps a unit, an item
// widens the weights of a chunk to elements like those of x.
Form by_rows(const Product& product, const Layout& layout, MultiplyFunction multiply,
    ConvertFunction convert, bool is_in_place, int64_t element_bytes, int step_inputs) {
    const int64_t num_inputs = layout.num_units * layout.unit_inputs;
    const int64_t weight_bytes = layout.unit_inputs > step_inputs ? element_bytes : 0;
    return {
        .multiply = multiply,
        .convert = convert,
        .is_in_place = is_in_place && product.matrix->num_in == num_inputs,
        .element_bytes = element_bytes,
        .num_inputs = num_inputs,
        .rows_together = kConvertRows,
        .most_rows = kMostRows,
        .scratch_bytes = kMaxChunkPanels * kPanelOutputs * num_inputs * weight_bytes,
        .widen = nullptr,
    };
}

Form by_type(const Product& product, const Layout& layout, Variant variant) {
    const auto type = static_cast<int>(type_read(product));
    const ProductKernels& kernels = PDSERVE_OF_VARIANT(variant, ProductKernels);
    if (product.is_bfloat16) {
        const TileKernels* tiles = tile_kernels(variant);
        if (tiles != nullptr && tiles->by_tiles[type] != nullptr) {
            return tiled(product, layout, tiles->by_tiles[type], tiles->tile_rows);
        }
        if (kernels.by_pairs[type] != nullptr) {
            return by_rows(product, layout, kernels.by_pairs[type], kernels.pad_pairs, true, 2, 2);
        }
    }
    const ConvertFunction convert =
        product.is_bfloat16 ? kernels.widen_bfloat16 : kernels.widen_float32;
    return by_rows(
        product, layout, kernels.by_float32[type], convert, !product.is_bfloat16, 4, 1);
}

}  // namespace

WeightType type_read(const Product& product) {
    if (product.matrix->type != WeightType::kCoded) return product.matrix->type;
    return product.is_bfloat16 ? WeightType::kBFloat16 : WeightType::kFloat32;
}

Form form_of(const Product& product, const Layout& layout, Variant variant) {
    Form form = by_type(product, layout, variant);
    if (product.matrix->type == WeightType::kCoded) {
        form.widen = PDSERVE_OF_VARIANT(variant, ProductKernels).widen_codes;
    }
    return form;
}

}  // namespace pdserve::linear
