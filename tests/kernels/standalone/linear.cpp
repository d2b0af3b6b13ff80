// Products with packed matrices against sums in double, and their bits in batches of other sizes.

#include <algorithm>
#include <cmath>

#include "check.h"
#include "linear/linear.h"
#include "linear/pack.h"

namespace check {

namespace {

using pdserve::Variant;
using namespace pdserve::linear;

constexpr int64_t kMostRows = 208;  // more than one item takes

struct Shape {
    int64_t num_out;
    int64_t num_in;
};

// Ends panels, units and vectors early; whole ones; and enough panels to share out among threads.
constexpr Shape kShapes[] = {{70, 61}, {48, 128}, {2, 1}, {34, 301}};

// Rows that are computed together: single ones, around the sizes of the tiles, and all.
struct Piece {
    int64_t first;
    int64_t count;
};
constexpr Piece kPieces[] = {{0, 1}, {150, 1}, {207, 1}, {2, 5}, {100, 6}, {101, 7}, {33, 13},
    {17, 16}, {140, 63}, {0, 97}};

struct alignas(64) Line {
    uint8_t bytes[64];
};

struct Packed {
    PackedMatrix matrix;
    std::vector<Line> weights;
    std::vector<float> scales;
    std::vector<float> bias;
    std::vector<double> unpacked;       // [num_out, num_in], what the packed weights stand for
    std::vector<double> unpacked_bias;  // [num_out]
};

// The column of the packed order that holds an output.
int64_t packed_lane(const PackedMatrix& matrix, int64_t output) {
    if (!matrix.is_gated) return output;
    const int64_t half = matrix.num_out / 2;
    const int64_t in_half = output % half;
    return (in_half / kPanelOutputs * 2 + output / half) * kPanelOutputs + in_half % kPanelOutputs;
}

// Weights that are bfloat16, so only int8 rounds them.
Packed pack(WeightType type, Shape shape, bool is_gated, bool has_bias) {
    const Matrix rows = Matrix::random(true, shape.num_out, shape.num_in, 1);
    const Layout layout = layout_of(type, shape.num_out, shape.num_in, is_gated);
    Packed packed;
    packed.weights.resize(layout.num_panels * layout.num_units);
    packed.scales.resize(layout.num_panels * kPanelOutputs);
    packed.bias.resize(layout.num_panels * kPanelOutputs);
    pack_rows({rows.row(0), true, shape.num_in, shape.num_out},
        {type, shape.num_out, shape.num_in, is_gated,
            reinterpret_cast<uint8_t*>(packed.weights.data()), packed.scales.data()},
        0);
    packed.matrix = {.type = type,
        .coding = {},
        .num_out = shape.num_out,
        .num_in = shape.num_in,
        .is_gated = is_gated,
        .weights = packed.weights.data(),
        .scales = type == WeightType::kInt8 ? packed.scales.data() : nullptr,
        .scale_stride = 0,
        .bias = has_bias ? packed.bias.data() : nullptr};
    for (int64_t o = 0; o < shape.num_out; ++o) {
        float largest = 0.0f;
        for (int64_t k = 0; k < shape.num_in; ++k) {
            largest = std::max(largest, std::fabs(rows.at(o, k)));
        }
        const float scale = largest / 127.0f;
        for (int64_t k = 0; k < shape.num_in; ++k) {
            const float weight = rows.at(o, k);
            packed.unpacked.push_back(type == WeightType::kInt8
                    ? static_cast<double>(scale) * std::nearbyint(weight / scale)
                    : weight);
        }
        const float bias = has_bias ? 0.25f * static_cast<float>(o % 9) - 1.0f : 0.0f;
        packed.bias[packed_lane(packed.matrix, o)] = bias;
        packed.unpacked_bias.push_back(bias);
    }
    return packed;
}

struct Expected {
    double value;
    double tolerance;  // a few roundings of the sums, and of x where it becomes integers
};

// Products of int8 and bfloat16 are of integers: x is rounded to 127 steps of the largest nearby.
double rounding_of_x(const Packed& packed, const Matrix& x, int64_t row) {
    if (packed.matrix.type != WeightType::kInt8 || !x.is_bfloat16()) return 0.0;
    double largest = 0.0;
    for (int64_t k = 0; k < x.num_columns(); ++k) {
        largest = std::max(largest, std::fabs(static_cast<double>(x.at(row, k))));
    }
    return largest / 254.0;
}

Expected expected_sum(const Packed& packed, const Matrix& x, int64_t row, int64_t output) {
    double sum = packed.unpacked_bias[output], magnitude = std::fabs(sum), weights = 0.0;
    for (int64_t k = 0; k < x.num_columns(); ++k) {
        const double weight = packed.unpacked[output * x.num_columns() + k];
        const double term = x.at(row, k) * weight;
        sum += term;
        magnitude += std::fabs(term);
        weights += std::fabs(weight);
    }
    return {sum, magnitude * 0x1p-20 + weights * rounding_of_x(packed, x, row)};
}

Expected expected_gated(const Packed& packed, const Matrix& x, int64_t row, int64_t column) {
    const Expected gate = expected_sum(packed, x, row, column);
    const Expected up = expected_sum(packed, x, row, column + packed.matrix.num_out / 2);
    const double silu = gate.value / (1.0 + std::exp(-gate.value));
    // The slope of silu is nowhere above 1.1.
    return {silu * up.value,
        1.1 * gate.tolerance * (std::fabs(up.value) + up.tolerance)
            + std::fabs(silu) * up.tolerance + std::fabs(silu * up.value) * 0x1p-19};
}

class Case {
public:
    Case(WeightType type, Shape shape, Result result, bool is_bfloat16, Variant variant)
        : result_(result),
          variant_(variant),
          packed_(pack(type, shape, result == Result::kGatedSilu, shape.num_in % 2 == 1)),
          x_(Matrix::random(is_bfloat16, kMostRows, shape.num_in, 2)) {
        name_ = std::string(variant_name(variant)) + ", weights "
            + std::to_string(static_cast<int>(type)) + " [" + std::to_string(shape.num_out) + ", "
            + std::to_string(shape.num_in) + "], result "
            + std::to_string(static_cast<int>(result)) + (is_bfloat16 ? ", bfloat16" : ", float32");
    }

    void run() const {
        const Matrix whole = product({0, kMostRows});
        for (int64_t row : {int64_t{0}, int64_t{5}, int64_t{200}, kMostRows - 1}) {
            for (int64_t column = 0; column < whole.num_columns(); ++column) {
                expect_near(whole, row, column);
            }
        }
        for (Piece piece : kPieces) {
            expect_same_bits(product(piece), whole, piece.first, piece.count, name_);
        }
    }

private:
    static constexpr float kBefore = 0.5f;  // what stands in `out`

    Matrix product(Piece piece) const {
        const PackedMatrix& matrix = packed_.matrix;
        const int64_t columns = matrix.is_gated ? matrix.num_out / 2 : matrix.num_out;
        const bool is_float = result_ == Result::kAdd || result_ == Result::kStoreFloat;
        Matrix out(x_.is_bfloat16() && !is_float, piece.count, columns);
        for (int64_t i = 0; i < piece.count * columns; ++i) {
            out.set(i / columns, i % columns, kBefore);
        }
        multiply({&matrix, x_.row(piece.first), x_.is_bfloat16(), matrix.num_in, piece.count,
                     result_, out.row(0), columns},
            variant_);
        return out;
    }

    void expect_near(const Matrix& found, int64_t row, int64_t column) const {
        Expected expected = packed_.matrix.is_gated ? expected_gated(packed_, x_, row, column)
                                                    : expected_sum(packed_, x_, row, column);
        if (result_ == Result::kAdd) expected.value += kBefore;
        const double rounding = found.is_bfloat16() ? 0x1p-8 : 0x1p-23;
        const double tolerance = expected.tolerance + std::fabs(expected.value) * rounding;
        const double value = found.at(row, column);
        if (std::fabs(value - expected.value) <= tolerance) return;
        fail(name_ + ": row " + std::to_string(row) + ", output " + std::to_string(column) + " is "
            + std::to_string(value) + " instead of " + std::to_string(expected.value));
    }

    const Result result_;
    const Variant variant_;
    const Packed packed_;
    const Matrix x_;
    std::string name_;
};

}  // namespace

int check_products(Variant variant) {
    int count = 0;
    for (WeightType type : {WeightType::kFloat32, WeightType::kBFloat16, WeightType::kInt8}) {
        for (Shape shape : kShapes) {
            for (Result result : {Result::kStore, Result::kAdd, Result::kGatedSilu}) {
                for (bool is_bfloat16 : {false, true}) {
                    Case(type, shape, result, is_bfloat16, variant).run();
                    ++count;
                }
            }
        }
    }
    return count;
}

}  // namespace check
