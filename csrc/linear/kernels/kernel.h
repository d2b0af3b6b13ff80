// The arguments of the product kernels, and the functions that each build of them provides.
// No inline functions here; see isa/element.h for why.
#pragma once

#include <cstdint>

#include "../../isa/element.h"
#include "../coding.h"
#include "../layout.h"
#include "../result.h"

namespace pdserve::linear {

// Number of panels whose products are finished together. Even for gated matrices, to keep gate and
// up together.
constexpr int kMaxChunkPanels = 4;

// One call. All fields have been checked.
struct Call {
    // Rows of float32, or of pairs of bfloat16, padded with zeros to a whole unit.
    const void* x;
    int64_t x_row_bytes;

    const uint8_t* weights;
    Layout layout;
    Coding coding;       // of products of integers, as these two are
    CodedLayout coded;
    int zero;  // taken away from what x is multiplied by: codes, or bytes that nested ones make
    const float* scales;   // [num_panels * 16] of each group of inputs, or null
    int64_t scale_stride;  // between groups; 0: there is one, whose scales are applied at the end
    const float* bias;     // [num_panels * 16] or null

    Result result;
    bool is_bfloat16;  // what "same type" means
    void* out;
    int64_t out_stride;
    int64_t num_columns;  // of out
    Delta delta;
};

// The unit of work: some rows, times some consecutive panels; first_panel is even.
struct WorkItem {
    int64_t first_row;
    int64_t num_rows;
    int64_t first_panel;
    int64_t num_panels;
};

// `scratch` is aligned to 64 bytes. If weights have to be widened, it holds a chunk with one unit
// per input: kMaxChunkPanels * num_units * unit_inputs * 64 bytes.
using MultiplyFunction = void (*)(const Call& call, const WorkItem& item, uint8_t* scratch);

// Converts rows for the kernels: target is [rows.count, padded], where `padded` is num_in rounded
// up to whole units.
struct Rows {
    const void* start;
    int64_t stride;  // in elements
    int64_t count;
};

using ConvertFunction = void (*)(
    const Rows& rows, int64_t num_in, int64_t padded, void* target);

// Consecutive panels of a coded matrix, and where they are put as panels of float32.
struct CodedPanels {
    const Coding& coding;
    const CodedLayout& layout;
    int64_t num_in;
    const uint8_t* start;
    int num_panels;
    uint8_t* target;  // aligned to 64 bytes
    int64_t target_panel_bytes;
};

using WidenFunction = void (*)(const CodedPanels& panels);

struct ProductKernels {
    MultiplyFunction by_float32[kNumForms];  // of x, by the type of the weights
    MultiplyFunction by_pairs[kNumForms];    // of bfloat16; null: x is widened, or integers
    ConvertFunction widen_float32;   // float32 -> float32, padded
    ConvertFunction widen_bfloat16;  // bfloat16 -> float32, padded
    ConvertFunction pad_pairs;       // bfloat16 -> pairs, padded
    WidenFunction widen_codes;
};

// Products through tiles (isa/amx.h), of x of bfloat16: [rows / 16][inputs / 32] tiles, padded with
// zeros. An item begins with a whole tile of rows. `scratch` holds kMaxChunkPanels tiles of
// weights, or as many panels of bfloat16 if the weights are fp8.
struct TileKernels {
    MultiplyFunction by_tiles[kNumForms];  // by the type of the weights; null: there are none
    ConvertFunction tile_rows;  // of up to 16 rows
};

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileInputs = 32;
constexpr int64_t kMostTileRows = 192;  // of an item: the sums of 2 panels stay in the L1 cache

extern const TileKernels kAmxTileKernels;
extern const TileKernels kAmxEmulatedTileKernels;

extern const ProductKernels kAvx512Bf16ProductKernels;
extern const ProductKernels kAvx512ProductKernels;
extern const ProductKernels kAvx2ProductKernels;
extern const ProductKernels kNeonBf16ProductKernels;
extern const ProductKernels kPortableProductKernels;

}  // namespace pdserve::linear
