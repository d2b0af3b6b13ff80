// A request's state in one group of a layer, in blocks of the pool.
#pragma once

#include <cstdint>
#include <vector>

#include "../scratch_buffer.h"
#include "kernel.h"
#include "launch.h"

namespace pdserve::recurrent {

int64_t channels_of(const Shape& shape);

// A stretch of the states of a pool.
struct Stretch {
    char* pool;
    int64_t block_bytes;
    int64_t first;  // byte of a request's state
    int64_t num_bytes;

    void clear(const int32_t* table) const;
    void copy(const int32_t* from, const int32_t* to) const;
    void read(const int32_t* table, int64_t at, int64_t count, char* to) const;
    void write(const int32_t* table, int64_t at, int64_t count, const char* from) const;
};

// Rows of a state where they are, or copies of those that a border of blocks divides or that do not
// fill vectors. Memory is reused: one at a time.
class GroupRows {
public:
    // Finds the rows of the request whose blocks are in `table`.
    State open(const Shape& shape, const Stretch& stretch, const int32_t* table);

    // Writes copies back.
    void close() const;

private:
    struct Copy {
        const float* row;
        int64_t at;  // of the stretch, as `count`
        int64_t count;
    };

    void add(int64_t num_rows, int64_t size, bool is_whole);

    std::vector<float*> rows_;
    ScratchBuffer memory_;
    std::vector<Copy> copies_;
    Stretch stretch_{};
    const int32_t* table_ = nullptr;
    int64_t at_ = 0;    // bytes of the stretch that have been found
    float* free_ = nullptr;
};

}  // namespace pdserve::recurrent
