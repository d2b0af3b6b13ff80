// What the checks of all kernels share: random numbers, elements of both types, and failing.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "isa/cpu.h"

namespace check {

[[noreturn]] inline void fail(const std::string& what) {
    std::printf("FAILED: %s\n", what.c_str());
    std::exit(1);
}

inline float from_bfloat16(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t to_bfloat16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Rows of float32 or bfloat16.
class Matrix {
public:
    Matrix(bool is_bfloat16, int64_t num_rows, int64_t num_columns)
        : is_bfloat16_(is_bfloat16),
          num_columns_(num_columns),
          bytes_(num_rows * num_columns * element_bytes()) {}

    // From -2 to 2.
    static Matrix random(bool is_bfloat16, int64_t num_rows, int64_t num_columns, int seed) {
        Matrix result(is_bfloat16, num_rows, num_columns);
        uint64_t state = seed;
        for (int64_t r = 0; r < num_rows; ++r) {
            for (int64_t column = 0; column < num_columns; ++column) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                result.set(r, column, static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-30f);
            }
        }
        return result;
    }

    bool is_bfloat16() const { return is_bfloat16_; }
    int64_t num_columns() const { return num_columns_; }
    int64_t element_bytes() const { return is_bfloat16_ ? 2 : 4; }
    int64_t row_bytes() const { return num_columns_ * element_bytes(); }
    uint8_t* row(int64_t r) { return bytes_.data() + r * row_bytes(); }
    const uint8_t* row(int64_t r) const { return bytes_.data() + r * row_bytes(); }

    float at(int64_t r, int64_t column) const {
        const uint8_t* start = row(r) + column * element_bytes();
        if (is_bfloat16_) return from_bfloat16(*reinterpret_cast<const uint16_t*>(start));
        return *reinterpret_cast<const float*>(start);
    }

    void set(int64_t r, int64_t column, float value) {
        uint8_t* start = row(r) + column * element_bytes();
        if (is_bfloat16_) {
            *reinterpret_cast<uint16_t*>(start) = to_bfloat16(value);
        } else {
            *reinterpret_cast<float*>(start) = value;
        }
    }

private:
    bool is_bfloat16_;
    int64_t num_columns_;
    std::vector<uint8_t> bytes_;
};

// Fails unless rows [first, first + count) of `expected` have the bits of rows [0, count).
inline void expect_same_bits(const Matrix& found, const Matrix& expected, int64_t first,
    int64_t count, const std::string& what) {
    if (std::memcmp(found.row(0), expected.row(first), count * expected.row_bytes()) != 0) {
        fail(what + ": rows " + std::to_string(first) + " to " + std::to_string(first + count)
            + " have other bits than in the whole batch");
    }
}

// Each fails with a message, or returns the number of cases that it has checked.
int check_products(pdserve::Variant variant);
int check_attention(pdserve::Variant variant);

// Adds the bits of the results to the digest.
int check_integers(pdserve::Variant variant, uint64_t& digest);

}  // namespace check
