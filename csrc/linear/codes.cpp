// Plain loops: packing happens once per checkpoint, and a step looks up one row for each token.

#include "codes.h"

#include <algorithm>
#include <cstring>

#include "../isa/simd.h"
#include "../threads/thread_pool.h"
#include "coding.h"
#include "panel_rows.h"

namespace pdserve::linear {

namespace {

constexpr int64_t kRowsPerItem = 8;  // that are looked up

constexpr int kUnitInputs = 4;
constexpr int kHalfInputs = kBlockInputs / 2;

// Where a block has the byte of an input, of those that are whole bytes.
int place_of(int input, int lane) {
    return input / kUnitInputs * kUnitBytes + lane * kUnitInputs + input % kUnitInputs;
}

// Where the bits of a code above its fourth are: `upper` of them.
struct UpperBits {
    UpperBits(int input, int upper)
        : input(kHalfInputs + (upper == 2 ? input / kHalfInputs * kUnitInputs : 0)
              + input % kUnitInputs),
          shift(input / kUnitInputs % (8 / upper) * upper) {}

    int input;  // whose byte they are in
    int shift;
};

CodedLayout layout_of(const PackedMatrix& matrix) {
    return coded_layout_of(matrix.coding, matrix.num_out, matrix.num_in, matrix.is_gated);
}

// Writes the lanes of some rows of one panel.
class PackCodes {
public:
    PackCodes(const CodeRows& source, const PackedMatrix& matrix, uint8_t* weights,
        int64_t first_row, const PanelRows& rows)
        : source_(source),
          bits_(matrix.coding.bits),
          num_in_(matrix.num_in),
          layout_(layout_of(matrix)),
          panel_(weights + rows.panel * layout_.panel_bytes),
          first_(rows.row - first_row),
          rows_(rows) {}

    void run() const {
        const int64_t end = layout_.numbers_end;
        if (rows_.lane == 0) std::memset(panel_ + end, 0, layout_.codes - end);
        for (int lane = rows_.lane; lane < rows_.end_lane(); ++lane) {
            const int64_t i = lane - rows_.lane;
            const int64_t row = i < rows_.count ? first_ + i : -1;  // -1: padding
            put_codes(lane, row < 0 ? nullptr : source_.codes + row * num_in_);
            const int64_t supers = layout_.num_supers, groups = layout_.num_groups;
            put(layout_.super_scales, lane, row, source_.super_scales, supers, 2);
            put(layout_.super_minimums, lane, row, source_.super_minimums, supers, 2);
            put(layout_.scales, lane, row, source_.scales, groups, layout_.scale_bytes);
            put(layout_.minimums, lane, row, source_.minimums, groups, layout_.scale_bytes);
        }
    }

private:
    // A number of each group or so, if the matrix has such.
    void put(int64_t offset, int lane, int64_t row, const uint8_t* numbers, int64_t count,
        int num_bytes) const {
        if (numbers == nullptr) return;
        uint8_t* target = panel_ + offset + lane * num_bytes;
        for (int64_t i = 0; i < count; ++i, target += kPanelOutputs * num_bytes) {
            if (row < 0) {
                std::memset(target, 0, num_bytes);
            } else {
                std::memcpy(target, numbers + (row * count + i) * num_bytes, num_bytes);
            }
        }
    }

    void put_codes(int lane, const uint8_t* codes) const {
        uint8_t* block = panel_ + layout_.codes;
        for (int64_t first = 0; first < num_in_; first += kBlockInputs, block += layout_.block_bytes) {
            uint8_t padded[kBlockInputs] = {};
            const int64_t count = std::min<int64_t>(kBlockInputs, num_in_ - first);
            if (codes != nullptr) std::memcpy(padded, codes + first, count);
            bits_ == 8 ? put_bytes(block, lane, padded) : put_bits(block, lane, padded);
        }
    }

    static void put_bytes(uint8_t* block, int lane, const uint8_t* codes) {
        for (int k = 0; k < kBlockInputs; ++k) block[place_of(k, lane)] = codes[k];
    }

    void put_bits(uint8_t* block, int lane, const uint8_t* codes) const {
        const int upper = bits_ - 4;  // 0, 1 or 2
        for (int k = 0; k < kHalfInputs; ++k) {
            block[place_of(k, lane)] =
                static_cast<uint8_t>((codes[k] & 15) | codes[k + kHalfInputs] << 4);
        }
        for (int k = 0; k < kUnitInputs * upper; ++k) block[place_of(kHalfInputs + k, lane)] = 0;
        for (int k = 0; k < kBlockInputs && upper > 0; ++k) {
            const UpperBits bits(k, upper);
            block[place_of(bits.input, lane)] |=
                static_cast<uint8_t>(codes[k] >> 4 << bits.shift);
        }
    }

    const CodeRows& source_;
    const int bits_;
    const int64_t num_in_;
    const CodedLayout layout_;
    uint8_t* const panel_;
    const int64_t first_;  // row of the source
    const PanelRows& rows_;
};

template <class T>
T read(const uint8_t* start, int64_t index) {
    T value;
    std::memcpy(&value, start + index * sizeof(T), sizeof(T));
    return value;
}

// As in kernels/widen.h.
float rounded_to_half(float value) {
    const float magnitude = value < 0 ? -value : value;
    const auto bits = __builtin_bit_cast(uint32_t, value);
    if (magnitude >= 0x1p-14f) {
        const uint32_t usual = (bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000u;
        return __builtin_bit_cast(float, usual);
    }
    const float small = (magnitude + 0.75f) - 0.75f;
    const uint32_t tiny = __builtin_bit_cast(uint32_t, small) | (bits & 0x80000000u);
    return __builtin_bit_cast(float, tiny);
}

// Decodes one output.
class Row {
public:
    Row(const PackedMatrix& matrix, int64_t row)
        : coding_(matrix.coding),
          layout_(layout_of(matrix)),
          panel_(static_cast<const uint8_t*>(matrix.weights)
              + row / kPanelOutputs * layout_.panel_bytes),
          lane_(row % kPanelOutputs) {}

    void decode(const CodedLookup& lookup, float* out) const {
        const int64_t num_in = lookup.table->num_in;
        for (int64_t first = 0; first < num_in; first += coding_.group) {
            const float scale = number(layout_.scales, layout_.super_scales, first);
            const float minimum = coding_.has_minimums
                ? number(layout_.minimums, layout_.super_minimums, first)
                : 0.0f;
            const int64_t end = std::min<int64_t>(num_in, first + coding_.group);
            for (int64_t k = first; k < end; ++k) {
                out[k] = scale * static_cast<float>(code(k) - coding_.zero);
                if (coding_.has_minimums) out[k] -= minimum;
                if (coding_.rounding == Rounding::kFloat16) out[k] = rounded_to_half(out[k]);
                if (coding_.rounding == Rounding::kBFloat16 || lookup.to_bfloat16) {
                    BFloat16 rounded;
                    assign(rounded, out[k]);
                    out[k] = to_float(rounded);
                }
                out[k] *= lookup.scale;
            }
        }
    }

private:
    float number(int64_t numbers, int64_t supers, int64_t input) const {
        const uint8_t* start = panel_ + numbers;
        const int64_t at = input / coding_.group * kPanelOutputs + lane_;
        switch (coding_.scale) {
            case ScaleType::kFloat16: return half_to_float(read<uint16_t>(start, at));
            case ScaleType::kFloat32: return read<float>(start, at);
            case ScaleType::kTwoLevels:
            case ScaleType::kNested: break;
        }
        const int64_t super = input / kSuperInputs * kPanelOutputs + lane_;
        return half_to_float(read<uint16_t>(panel_ + supers, super))
            * static_cast<float>(read<int8_t>(start, at));
    }

    int code(int64_t input) const {
        const uint8_t* block = panel_ + layout_.codes + input / kBlockInputs * layout_.block_bytes;
        const auto k = static_cast<int>(input % kBlockInputs);
        if (coding_.bits == 8) return block[place_of(k, lane_)];
        const int lower = block[place_of(k % kHalfInputs, lane_)] >> (k / kHalfInputs * 4) & 15;
        const int upper = coding_.bits - 4;
        if (upper == 0) return lower;
        const UpperBits bits(k, upper);
        return lower | (block[place_of(bits.input, lane_)] >> bits.shift & ((1 << upper) - 1)) << 4;
    }

    const Coding& coding_;
    const CodedLayout layout_;
    const uint8_t* const panel_;
    const int64_t lane_;
};

}  // namespace

void pack_codes(const CodeRows& source, const PackedMatrix& matrix, uint8_t* weights,
    int64_t first_row) {
    const Runs runs(matrix.num_out, matrix.is_gated, first_row, first_row + source.num_rows);
    ThreadPool::instance().parallel_for(runs.count(), [&](int64_t i) {
        const PanelRows rows = runs.at(i);
        PackCodes(source, matrix, weights, first_row, rows).run();
    });
}

void look_up(const CodedLookup& lookup, int64_t num_rows) {
    const PackedMatrix& table = *lookup.table;
    const int64_t num_items = (num_rows + kRowsPerItem - 1) / kRowsPerItem;
    ThreadPool::instance().parallel_for(num_items, [&](int64_t item) {
        const int64_t end = std::min(num_rows, (item + 1) * kRowsPerItem);
        for (int64_t i = item * kRowsPerItem; i < end; ++i) {
            Row(table, lookup.ids[i]).decode(lookup, lookup.out + i * table.num_in);
        }
    });
}

}  // namespace pdserve::linear
