// What adapters add to products: rows of the same adapter are brought together, and multiplied by
// its A and then by its B (segmented products).
#pragma once

#include <cstdint>
#include <vector>

#include "../../isa/cpu.h"
#include "../../linear/linear.h"
#include "../../scratch_buffer.h"
#include "adapter.h"

namespace pdserve::decoder {

class Deltas {
public:
    Deltas(bool is_bfloat16, Variant variant) : is_bfloat16_(is_bfloat16), variant_(variant) {}

    // Of a product of the matrix, padded as in linear::Delta.
    static int64_t columns_of(const linear::PackedMatrix& matrix);

    // How many rows of a product are computed together, so that what is added stays in a cache.
    static int64_t rows_at_once(const linear::PackedMatrix& matrix);

    // What `adapters`, one of each row or null, add to the product of x, [num_rows, num_in] and
    // contiguous. A row of it depends, bit for bit, only on that row and its adapter. Valid until
    // the next call.
    linear::Delta of(const linear::PackedMatrix& matrix, const void* x, int64_t num_rows,
        const Adapter* const* adapters);

    // The same of rows that are multiplied by matrices of one size: additions()[row], or null.
    // `columns`: as columns_of.
    std::vector<const Addition*>& additions() { return additions_; }
    linear::Delta compute(const void* x, int64_t num_in, int64_t columns);

private:
    // The rows of one addition.
    struct Segment {
        const Addition* addition;
        int64_t first_place;
        int64_t count;
        int64_t first_row;   // of x, if they follow each other there
        bool is_in_place;    // they do
    };

    void sort_rows();
    void gather(const char* x, int64_t row_bytes);
    void shrink(const char* x, int64_t row_bytes);
    void expand(int64_t columns);

    const bool is_bfloat16_;
    const Variant variant_;
    std::vector<const Addition*> additions_;
    std::vector<Segment> segments_;
    std::vector<int32_t> segment_of_;  // each row; -1: it has none
    std::vector<int32_t> places_;
    std::vector<int64_t> inner_starts_;  // of each segment, in bytes
    std::vector<linear::Product> products_;
    ScratchBuffer gathered_, inner_, delta_;
};

}  // namespace pdserve::decoder
