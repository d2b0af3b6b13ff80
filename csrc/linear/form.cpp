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
constexpr int64_t kIntegerRows = 4;

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

int64_t most_tiled_rows(int64_t row_bytes) {
    const int64_t fitting = kMostTileBytes / row_bytes / (2 * kTileRows) * 2 * kTileRows;
    return std::clamp(fitting, 4 * kTileRows, kMostTileRows);
}

Form tiled(const Product& product, const Layout& layout, MultiplyFunction multiply,
    ConvertFunction convert) {
    const int64_t num_inputs = round_up(product.matrix->num_in, kTileInputs);
    const int64_t row_bytes = num_inputs * 2;
    const bool is_widened = layout.unit_inputs > 2;  // else units are rows of tiles
    return {
        .multiply = multiply,
        .convert = convert,
        .quantise = nullptr,
        .is_in_place = false,
        .row_bytes = row_bytes,
        .num_inputs = num_inputs,
        .rows_together = kTileRows,
        .most_rows = most_tiled_rows(row_bytes),
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
        .quantise = nullptr,
        .is_in_place = is_in_place && product.matrix->num_in == num_inputs,
        .row_bytes = num_inputs * element_bytes,
        .num_inputs = num_inputs,
        .rows_together = kConvertRows,
        .most_rows = kMostRows,
        .scratch_bytes = kMaxChunkPanels * kPanelOutputs * num_inputs * weight_bytes,
        .widen = nullptr,
    };
}

// As what the kernels of floats read the weights: a coded matrix is widened.
WeightType type_read(const Product& product) {
    const WeightType type = product.matrix->type;
    return type == WeightType::kCoded ? WeightType::kFloat32 : type;
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

// Tiles multiply int8, nested codes, and codes of which 32 share a scale and make exact sums.
const IntegerTileKernels* integer_tile_kernels(const Coding& coding, Variant variant) {
#if defined(__x86_64__)
    const bool is_emulated = variant == Variant::kAmxEmulated;
    if (!is_emulated && variant != Variant::kAmx) return nullptr;
    if (coding.group == 0) {
        return is_emulated ? &kAmxEmulatedIntegerTileKernels : &kAmxIntegerTileKernels;
    }
    if (coding.is_nested()) {
        return is_emulated ? &kAmxEmulatedNestedTileKernels : &kAmxNestedTileKernels;
    }
    if (coding.bits == 4 && coding.group == kBlockInputs) {
        return is_emulated ? &kAmxEmulatedCodeTileKernels : &kAmxCodeTileKernels;
    }
#else
    (void)coding;
    (void)variant;
#endif
    return nullptr;
}

const IntegerKernels& integer_kernels(Variant variant) {
#if defined(__x86_64__)
    const bool is_wide = variant == Variant::kAmx || variant == Variant::kAvx512Bf16
        || variant == Variant::kAvx512;
    if (is_wide && cpu_features().avx512_vnni) return kAvx512VnniIntegerKernels;
    if (is_wide || variant == Variant::kAvx2) return kAvx2IntegerKernels;
#elif defined(__aarch64__)
    if (variant != Variant::kPortable && cpu_features().neon_dot) {
        return cpu_features().neon_i8mm ? kNeonI8mmIntegerKernels : kNeonDotIntegerKernels;
    }
#else
    (void)variant;
#endif
    return kPortableIntegerKernels;
}

Form of_integer_tiles(int64_t num_inputs, const IntegerTileKernels& kernels) {
    const int64_t row_bytes = kernels.row_bytes(num_inputs);
    return {
        .multiply = kernels.multiply,
        .convert = nullptr,
        .quantise = kernels.tile_rows,
        .is_in_place = false,
        .row_bytes = row_bytes,
        .num_inputs = num_inputs,
        .rows_together = kTileRows,
        .most_rows = most_tiled_rows(row_bytes),
        .scratch_bytes = kernels.scratch_bytes(num_inputs),
        .widen = nullptr,
    };
}

// A matrix of int8 has the codes of one, with scales elsewhere.
Form of_integers(const Product& product, Variant variant, Call& call) {
    const PackedMatrix& matrix = *product.matrix;
    const IntegerKernels& kernels = integer_kernels(variant);
    const bool is_coded = matrix.type == WeightType::kCoded;
    const int64_t num_blocks = (matrix.num_in + kBlockInputs - 1) / kBlockInputs;
    call.coding = is_coded ? matrix.coding
                           : Coding{8, 0, kInt8Zero, ScaleType::kFloat32, false, Rounding::kNone};
    if (is_coded) {
        call.coded =
            coded_layout_of(matrix.coding, matrix.num_out, matrix.num_in, matrix.is_gated);
    } else {
        call.coded.panel_bytes = call.layout.panel_bytes;
        call.coded.block_bytes = 8 * kUnitBytes;
    }
    const int64_t groups = call.coded.padded_groups();
    call.zero = call.coding.is_nested() ? kInt8Zero : call.coding.zero;
    call.layout = {call.layout.num_panels, num_blocks * 8, 4, call.coded.panel_bytes};
    const IntegerTileKernels* tiles = integer_tile_kernels(call.coding, variant);
    if (tiles != nullptr && product.num_rows >= tiles->fewest_rows) {
        return of_integer_tiles(num_blocks * kBlockInputs, *tiles);
    }
    return {
        .multiply = kernels.multiply,
        .convert = nullptr,
        .quantise = kernels.quantise,
        .is_in_place = false,
        .row_bytes = num_blocks * kRowBlockBytes + kRowEndBytes,
        .num_inputs = num_blocks * kBlockInputs,
        .rows_together = kIntegerRows,
        .most_rows = kMostRows,
        .scratch_bytes = kMaxChunkPanels
            * (num_blocks * 8 * kUnitBytes
                + 2 * groups * kPanelOutputs * static_cast<int64_t>(sizeof(float))),
        .widen = nullptr,
    };
}

// Whether x becomes integers: of float32 never does.
bool multiplies_integers(const Product& product) {
    const WeightType type = product.matrix->type;
    return product.is_bfloat16 && (type == WeightType::kInt8 || type == WeightType::kCoded);
}

}  // namespace

Form form_of(const Product& product, Variant variant, Call& call) {
    const PackedMatrix& matrix = *product.matrix;
    call.layout = layout_of(type_read(product), matrix.num_out, matrix.num_in, matrix.is_gated);
    if (multiplies_integers(product)) return of_integers(product, variant, call);
    Form form = by_type(product, call.layout, variant);
    if (matrix.type == WeightType::kCoded) {
        form.widen = PDSERVE_OF_VARIANT(variant, ProductKernels).widen_codes;
    }
    return form;
}

}  // namespace pdserve::linear
