#include "group_state.h"

#include <algorithm>
#include <cstring>

namespace pdserve::recurrent {

namespace {

constexpr int64_t kMostLanes = 16;
constexpr int64_t kFloat = sizeof(float);

int64_t padded(int64_t size) { return (size + kMostLanes - 1) / kMostLanes * kMostLanes; }

// Calls body(offset of a block's bytes in the stretch, of the stretch's, count), piece by piece.
template <class Body>
void each_piece(const Stretch& stretch, int64_t at, int64_t count, const Body& body) {
    for (int64_t done = 0; done < count;) {
        const int64_t byte = stretch.first + at + done;
        const int64_t within = byte % stretch.block_bytes;
        const int64_t piece = std::min(count - done, stretch.block_bytes - within);
        body(byte / stretch.block_bytes, within, done, piece);
        done += piece;
    }
}

}  // namespace

int64_t channels_of(const Shape& shape) {
    return 2 * shape.key_dim + shape.group_size * shape.value_dim;
}

void Stretch::clear(const int32_t* table) const {
    each_piece(*this, 0, num_bytes, [&](int64_t index, int64_t within, int64_t, int64_t count) {
        std::memset(pool + table[index] * block_bytes + within, 0, count);
    });
}

void Stretch::copy(const int32_t* from, const int32_t* to) const {
    each_piece(*this, 0, num_bytes, [&](int64_t index, int64_t within, int64_t, int64_t count) {
        std::memcpy(pool + to[index] * block_bytes + within,
            pool + from[index] * block_bytes + within, count);
    });
}

void Stretch::read(const int32_t* table, int64_t at, int64_t count, char* to) const {
    each_piece(*this, at, count, [&](int64_t index, int64_t within, int64_t done, int64_t piece) {
        std::memcpy(to + done, pool + table[index] * block_bytes + within, piece);
    });
}

void Stretch::write(const int32_t* table, int64_t at, int64_t count, const char* from) const {
    each_piece(*this, at, count, [&](int64_t index, int64_t within, int64_t done, int64_t piece) {
        std::memcpy(pool + table[index] * block_bytes + within, from + done, piece);
    });
}

State GroupRows::open(const Shape& shape, const Stretch& stretch, const int32_t* table) {
    const int64_t before = shape.kernel - 1, channels = channels_of(shape);
    const int64_t num_matrix = shape.group_size * shape.key_dim;
    const int64_t num_deltas = shape.group_size * kChunk;
    const int64_t key_width = padded(shape.key_dim), value_width = padded(shape.value_dim);
    rows_.clear();
    copies_.clear();
    stretch_ = stretch;
    table_ = table;
    at_ = 0;
    free_ = memory_.of<float>(before * channels + (num_matrix + num_deltas) * value_width
        + kChunk * key_width + shape.group_size * (kChunk + 1));
    add(before, channels, true);
    add(num_matrix, shape.value_dim, shape.value_dim == value_width);
    add(kChunk, shape.key_dim, shape.key_dim == key_width);
    add(num_deltas, shape.value_dim, shape.value_dim == value_width);
    add(shape.group_size, kChunk + 1, true);
    State state{};
    float* const* row = rows_.data();
    state.inputs = row;
    state.matrices = row += before;
    state.keys = row += num_matrix;
    state.deltas = row += kChunk;
    state.shares = row += num_deltas;
    return state;
}

void GroupRows::add(int64_t num_rows, int64_t size, bool is_whole) {
    const int64_t num_bytes = size * kFloat, block_bytes = stretch_.block_bytes;
    int64_t index = (stretch_.first + at_) / block_bytes;
    int64_t within = (stretch_.first + at_) % block_bytes;
    for (int64_t r = 0; r < num_rows; ++r) {
        if (is_whole && within + num_bytes <= block_bytes && within % kFloat == 0) {
            char* const block = stretch_.pool + table_[index] * block_bytes;
            rows_.push_back(reinterpret_cast<float*>(block + within));
        } else {
            std::fill(free_ + size, free_ + padded(size), 0.0f);
            stretch_.read(table_, at_, num_bytes, reinterpret_cast<char*>(free_));
            copies_.push_back({free_, at_, num_bytes});
            rows_.push_back(free_);
            free_ += is_whole ? size : padded(size);
        }
        at_ += num_bytes;
        for (within += num_bytes; within >= block_bytes; within -= block_bytes) ++index;
    }
}

void GroupRows::close() const {
    for (const Copy& copy : copies_) {
        stretch_.write(table_, copy.at, copy.count, reinterpret_cast<const char*>(copy.row));
    }
}

}  // namespace pdserve::recurrent
