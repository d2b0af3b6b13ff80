// Products of integers: every build has the bits of the plainest one, in batches of any size. Their
// digest is printed, as it is the same on every machine.

#include <array>

#include "check.h"
#include "linear/codes.h"
#include "linear/linear.h"

namespace check {

namespace {

using pdserve::Variant;
using namespace pdserve::linear;

constexpr int64_t kNumOut = 40, kNumRows = 24;

// Each width, group and kind of scales.
constexpr Coding kCodings[] = {
    {8, 0, kInt8Zero, ScaleType::kFloat32, false, Rounding::kNone},  // int8: a scale for each output
    {4, 32, 8, ScaleType::kFloat16, false, Rounding::kNone},
    {4, 128, 0, ScaleType::kFloat32, true, Rounding::kNone},
    {4, 32, 0, ScaleType::kTwoLevels, true, Rounding::kNone},
    {4, 32, 0, ScaleType::kNested, true, Rounding::kNone},
    {5, 16, 16, ScaleType::kFloat32, false, Rounding::kNone},
    {6, 16, 32, ScaleType::kTwoLevels, true, Rounding::kNone},
    {8, 32, 128, ScaleType::kFloat16, false, Rounding::kNone},
};

struct Piece {
    int64_t first;
    int64_t count;
};
constexpr Piece kPieces[] = {{0, 1}, {3, 2}, {5, 9}, {20, 3}};

struct alignas(64) Line {
    uint8_t bytes[64];
};

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}

    // Below `end`.
    int below(int end) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int>((state_ >> 33) % static_cast<uint64_t>(end));
    }

private:
    uint64_t state_;
};

using Bytes = std::vector<uint8_t>;

template <class T>
void append(Bytes& bytes, T value) {
    const auto raw = std::bit_cast<std::array<uint8_t, sizeof(T)>>(value);
    bytes.insert(bytes.end(), raw.begin(), raw.end());
}

// Scales or minimums of groups, or what these are multiplied by.
Bytes random_numbers(Random& random, ScaleType type, int64_t count) {
    Bytes bytes;
    for (int64_t i = 0; i < count; ++i) {
        switch (type) {
            case ScaleType::kFloat16:
                append(bytes, static_cast<uint16_t>(0x2c00 + random.below(1024)));
                break;
            case ScaleType::kFloat32: append(bytes, 0.001f * static_cast<float>(random.below(999))); break;
            case ScaleType::kTwoLevels: append(bytes, static_cast<int8_t>(random.below(96) - 32)); break;
            case ScaleType::kNested: append(bytes, static_cast<uint8_t>(1 + random.below(15))); break;
        }
    }
    return bytes;
}

struct Packed {
    PackedMatrix matrix;
    std::vector<Line> weights;
    std::vector<float> scales;
};

Packed pack_int8(Random& random, int64_t num_in) {
    const Layout layout = layout_of(WeightType::kInt8, kNumOut, num_in, false);
    Packed packed;
    packed.weights.resize(layout.num_panels * layout.num_units);
    for (Line& line : packed.weights) {
        for (uint8_t& byte : line.bytes) byte = static_cast<uint8_t>(1 + random.below(255));
    }
    for (int64_t i = 0; i < layout.num_panels * kPanelOutputs; ++i) {
        packed.scales.push_back(0.001f * static_cast<float>(1 + random.below(999)));
    }
    packed.matrix = {.type = WeightType::kInt8,
        .coding = {},
        .num_out = kNumOut,
        .num_in = num_in,
        .is_gated = false,
        .weights = packed.weights.data(),
        .scales = packed.scales.data(),
        .scale_stride = 0,
        .bias = nullptr};
    return packed;
}

Packed pack_coded(Random& random, const Coding& coding, int64_t num_in) {
    const CodedLayout layout = coded_layout_of(coding, kNumOut, num_in, false);
    Packed packed;
    packed.weights.resize(layout.num_panels * layout.panel_bytes / sizeof(Line) + 1);
    packed.matrix = {.type = WeightType::kCoded,
        .coding = coding,
        .num_out = kNumOut,
        .num_in = num_in,
        .is_gated = false,
        .weights = packed.weights.data(),
        .scales = nullptr,
        .scale_stride = 0,
        .bias = nullptr};
    Bytes codes;
    for (int64_t i = 0; i < kNumOut * num_in; ++i) {
        codes.push_back(static_cast<uint8_t>(random.below(1 << coding.bits)));
    }
    const int64_t groups = kNumOut * layout.num_groups, supers = kNumOut * layout.num_supers;
    const Bytes scales = random_numbers(random, coding.scale, groups);
    Bytes minimums = random_numbers(random, coding.scale, groups);
    if (coding.is_nested()) {
        for (int64_t i = 0; i < groups; ++i) minimums[i] = static_cast<uint8_t>(8 * scales[i]);
    }
    const Bytes super_scales = random_numbers(random, ScaleType::kFloat16, supers);
    const Bytes super_minimums = random_numbers(random, ScaleType::kFloat16, supers);
    const bool has_minimums = coding.has_minimums, is_nested = coding.is_nested();
    const CodeRows rows{
        .num_rows = kNumOut,
        .codes = codes.data(),
        .scales = scales.data(),
        .minimums = has_minimums ? minimums.data() : nullptr,
        .super_scales = supers > 0 ? super_scales.data() : nullptr,
        .super_minimums = supers > 0 && has_minimums && !is_nested ? super_minimums.data() : nullptr,
    };
    pack_codes(rows, packed.matrix, reinterpret_cast<uint8_t*>(packed.weights.data()), 0);
    return packed;
}

// In each third row a few columns are far above the others.
Matrix random_rows(int64_t num_in) {
    Matrix x = Matrix::random(true, kNumRows, num_in, 5);
    for (int64_t row = 0; row < kNumRows; row += 3) {
        for (int64_t column = 7; column < num_in; column += 90) {
            x.set(row, column, 25.0f * x.at(row, column));
        }
    }
    return x;
}

Matrix product(const PackedMatrix& matrix, Matrix& x, Piece piece, Variant variant) {
    Matrix out(false, piece.count, kNumOut);
    multiply({&matrix, x.row(piece.first), true, matrix.num_in, piece.count, Result::kStoreFloat,
                 out.row(0), kNumOut},
        variant);
    return out;
}

}  // namespace

int check_integers(Variant variant, uint64_t& digest) {
    Random random(11);
    int count = 0;
    for (const Coding& coding : kCodings) {
        const int64_t num_in = coding.group == 0 ? 1100 : coding.group * (coding.group > 64 ? 3 : 9);
        const Packed packed =
            coding.group == 0 ? pack_int8(random, num_in) : pack_coded(random, coding, num_in);
        Matrix x = random_rows(num_in);
        const Piece all{0, kNumRows};
        const Matrix expected = product(packed.matrix, x, all, Variant::kPortable);
        const std::string name = std::string(variant_name(variant)) + ", codes of "
            + std::to_string(coding.bits) + " bits, groups of " + std::to_string(coding.group);
        expect_same_bits(product(packed.matrix, x, all, variant), expected, 0, kNumRows, name);
        for (Piece piece : kPieces) {
            expect_same_bits(product(packed.matrix, x, piece, variant), expected, piece.first,
                piece.count, name);
        }
        for (int64_t i = 0; i < kNumRows * expected.row_bytes(); ++i) {
            digest = (digest ^ expected.row(0)[i]) * 1099511628211u;  // FNV-1a
        }
        ++count;
    }
    return count;
}

}  // namespace check
