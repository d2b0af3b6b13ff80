// What adapters add to products: rows of the same adapter are brought together and multiplied by its
// A (segmented products); the product itself adds B times that as it finishes
// (linear/kernels/expand.h).
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

    // What `adapters`, one of each row or null, add to the product of x, [num_rows, num_in], whose
    // rows are x_stride elements apart; 0: num_in. A row of it depends, bit for bit, only on that
    // row and its adapter. Valid until the next call.
    linear::Delta of(const linear::PackedMatrix& matrix, const void* x, int64_t num_rows,
        const Adapter* const* adapters, int64_t x_stride = 0);

    // The same of rows of several matrices with as many inputs: additions()[row], or null.
    std::vector<const Addition*>& additions() { return additions_; }
    linear::Delta compute(const void* x, int64_t num_in, int64_t x_stride = 0);

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
    void gather(const char* x, int64_t row_bytes, int64_t stride_bytes);
    void shrink(const char* x, int64_t row_bytes, int64_t x_stride);

    const bool is_bfloat16_;
    const Variant variant_;
    std::vector<const Addition*> additions_;
    std::vector<Segment> segments_;
    std::vector<int32_t> segment_of_;  // each row; -1: it has none
    std::vector<int64_t> places_;      // likewise: among the rows of all segments
    std::vector<const linear::Expansion*> expansions_;  // of each row, as in linear::Delta
    std::vector<const float*> inner_rows_;              // likewise
    std::vector<linear::Product> products_;
    ScratchBuffer gathered_, inner_;
};

}  // namespace pdserve::decoder
