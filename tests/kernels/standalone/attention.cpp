// Attention over a paged pool against sums in double, and its bits in other chunks of the prompt.

#include <algorithm>
#include <cmath>

#include "attention/layer.h"
#include "check.h"

namespace check {

namespace {

using pdserve::Variant;
using namespace pdserve::attention;

struct Shape {
    int num_kv_heads;
    int group_size;
    int head_dim;
    int block_size;
    int window;  // 0: none
};

// Heads of whole vectors, of an odd size and of one element; rows of a block side by side or not.
constexpr Shape kShapes[] = {
    {2, 2, 64, 16, 0}, {1, 3, 31, 5, 40}, {1, 1, 80, 16, 0}, {1, 7, 96, 32, 100}, {1, 1, 1, 3, 0}};

constexpr int kContext = 583;  // more than a run of keys; the last tile is not full

class Case {
public:
    Case(Shape shape, bool is_bfloat16, Variant variant)
        : shape_(shape),
          variant_(variant),
          is_bfloat16_(is_bfloat16),
          num_heads_(shape.num_kv_heads * shape.group_size),
          num_blocks_((kContext + shape.block_size - 1) / shape.block_size),
          query_(Matrix::random(is_bfloat16, kContext, num_heads_ * shape.head_dim, 3)),
          pool_(Matrix::random(
              is_bfloat16, num_blocks_ * 2 * shape.num_kv_heads * shape.block_size,
              shape.head_dim, 4)) {
        for (int i = 0; i < num_blocks_; ++i) table_.push_back((i * 7 + 3) % num_blocks_);
        if (num_blocks_ % 7 == 0) fail("the blocks are no permutation");
        for (int p = kContext; p < num_blocks_ * shape.block_size; ++p) hide(p);
        name_ = std::string(variant_name(variant)) + ", head_dim "
            + std::to_string(shape.head_dim) + (is_bfloat16 ? ", bfloat16" : ", float32");
    }

    void run() {
        run(0, 81, {0, 1, 63, 80}, {{0, 1}, {1, 5}, {60, 16}, {64, 1}, {64, 17}});
        run(488, kContext, {0, 24, 94}, {{0, 16}, {23, 1}, {24, 7}, {32, 63}, {94, 1}});
        // A NaN stays with the rows that see it.
        constexpr int kFirst = 40, kHidden = 71;
        const Matrix before = attention(kFirst, kHidden);
        hide(kHidden);
        expect_same_bits(before, attention(kFirst, kHidden + 5), 0, kHidden - kFirst, name_);
    }

private:
    struct Piece {
        int first;
        int count;
    };

    // Computes rows [first, last) of the prompt at once, checks some of them, counted from the
    // first, and computes pieces of them again.
    void run(int first, int last, std::initializer_list<int> rows,
        std::initializer_list<Piece> pieces) const {
        const Matrix whole = attention(first, last);
        for (int row : rows) {
            for (int head = 0; head < num_heads_; ++head) expect_near(whole, first, row, head);
        }
        for (Piece piece : pieces) {
            const int start = first + piece.first;
            expect_same_bits(
                attention(start, start + piece.count), whole, piece.first, piece.count, name_);
        }
    }

    // The row of the pool that holds a key, or a value.
    int64_t pool_row(bool is_value, int kv_head, int position) const {
        const int64_t block = table_[position / shape_.block_size];
        return ((block * 2 + is_value) * shape_.num_kv_heads + kv_head) * shape_.block_size
            + position % shape_.block_size;
    }

    // As a position that holds no token.
    void hide(int position) {
        for (int head = 0; head < shape_.num_kv_heads; ++head) {
            for (int d = 0; d < shape_.head_dim; ++d) {
                for (bool is_value : {false, true}) {
                    pool_.set(pool_row(is_value, head, position), d,
                        std::bit_cast<float>(0x7fc00000));
                }
            }
        }
    }

    // Rows [first, last) of the prompt, as a step of their own.
    Matrix attention(int32_t first, int32_t last) const {
        const int32_t query_start[] = {0, last - first};
        const Step step{1, last - first, query_start, &last, table_.data(), num_blocks_, nullptr};
        const KvFormat format = is_bfloat16_ ? KvFormat::kBFloat16 : KvFormat::kFloat32;
        const Pool pool{.data = const_cast<uint8_t*>(pool_.row(0)),
            .format = format,
            .num_layers = 1,
            .num_planes = 2,
            .pool_heads = shape_.num_kv_heads,
            .num_kv_heads = shape_.num_kv_heads,
            .block_size = shape_.block_size,
            .head_dim = shape_.head_dim};
        Matrix out(is_bfloat16_, last - first, query_.num_columns());
        Plan plan;
        plan.make(step, pool, num_heads_, shape_.window);
        const QueryRows query{
            query_.row(first), query_.num_columns(), shape_.head_dim, is_bfloat16_};
        attend(plan, step, 0, query, out.row(0), Scoring{scale()}, variant_);
        return out;
    }

    float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

    double score(int row, int head, int position) const {
        const int64_t key = pool_row(false, head / shape_.group_size, position);
        double sum = 0.0;
        for (int d = 0; d < shape_.head_dim; ++d) {
            sum += static_cast<double>(query_.at(row, head * shape_.head_dim + d))
                * pool_.at(key, d);
        }
        return sum * scale();
    }

    // exp(score) of all positions that the query sees; 0 before them.
    std::vector<double> weights_of(int position, int head) const {
        const int first = shape_.window > 0 ? std::max(0, position + 1 - shape_.window) : 0;
        std::vector<double> weights(first, 0.0);
        for (int p = first; p <= position; ++p) weights.push_back(std::exp(score(position, head, p)));
        return weights;
    }

    // `row` of `found`, which begins at the position `first`.
    void expect_near(const Matrix& found, int first, int row, int head) const {
        const std::vector<double> weights = weights_of(first + row, head);
        for (int d = 0; d < shape_.head_dim; ++d) {
            double total = 0.0, sum = 0.0;
            for (int p = 0; p <= first + row; ++p) {
                total += weights[p];
                sum += weights[p] * pool_.at(pool_row(true, head / shape_.group_size, p), d);
            }
            const double expected = sum / total;
            const double value = found.at(row, head * shape_.head_dim + d);
            const double tolerance = (is_bfloat16_ ? 8e-3 : 4e-6) * (1.0 + std::fabs(expected));
            if (std::fabs(value - expected) <= tolerance) continue;
            fail(name_ + ": position " + std::to_string(first + row) + ", head "
                + std::to_string(head) + ", dimension " + std::to_string(d) + " is "
                + std::to_string(value) + " instead of " + std::to_string(expected));
        }
    }

    const Shape shape_;
    const Variant variant_;
    const bool is_bfloat16_;
    const int num_heads_;
    const int num_blocks_;
    const Matrix query_;  // [kContext, num_heads * head_dim]
    Matrix pool_;         // [num_blocks * 2 * num_kv_heads * block_size, head_dim]
    std::vector<int32_t> table_;
    std::string name_;
};

}  // namespace

int check_attention(Variant variant) {
    int count = 0;
    for (Shape shape : kShapes) {
        for (bool is_bfloat16 : {false, true}) {
            Case(shape, is_bfloat16, variant).run();
            ++count;
        }
    }
    return count;
}

}  // namespace check
