// Copies, sends and receives few blocks. Everything is checked before the first byte moves. Small
// reads keep the interpreter lock: they end before another thread would have taken it.

#include "block_read.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <sys/socket.h>
#include <sys/uio.h>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "../tensor_view.h"
#include "block_sum.h"
#include "checks.h"
#include "copy_choice.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using Region = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstRegion = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Generations = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = std::vector<int64_t>;
using Numbers = std::vector<uint64_t>;

constexpr int64_t kLockedBytes = 128 << 10;  // of reads that keep the interpreter lock

constexpr size_t kMaxVectors = 1024;  // IOV_MAX on Linux

// Releases the interpreter lock, unless so many bytes are few.
class Unlocked {
public:
    explicit Unlocked(int64_t nbytes)
        : state_(nbytes > kLockedBytes ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

private:
    PyThreadState* const state_;
};

// The rows (offset in a block, bytes, place of the first word) of some blocks of a pool; the last
// block may have others than those before.
class Blocks {
public:
    Blocks(const char* region, size_t region_bytes, int64_t block_bytes, const Ids& ids,
           const Rows& rows, const Rows& last_rows)
        : block_bytes_(block_bytes), ids_(ids), rows_(rows), last_(last_rows) {
        if (block_bytes <= 0)
            raise_value_error("block_bytes", "> 0", std::to_string(block_bytes));
        check_rows(rows);
        check_rows(last_rows);
        for (size_t i = 0; i < ids.size(); ++i) {
            const int64_t most = static_cast<int64_t>(region_bytes) / block_bytes;
            if (ids[i] < 0 || ids[i] >= most)
                raise_value_error("block " + std::to_string(i) + " of the " + region,
                                  "an id from 0 to " + std::to_string(most - 1),
                                  std::to_string(ids[i]));
        }
    }

    size_t count() const { return ids_.size(); }
    size_t num_rows(size_t block) const { return rows_of(block).shape(0); }
    const int64_t* row(size_t block, size_t row) const { return rows_of(block).data() + 4 * row; }
    int64_t begin(size_t block) const { return ids_[block] * block_bytes_; }

    int64_t num_bytes() const {
        int64_t total = 0;
        for (size_t i = 0; i < count(); ++i)
            for (size_t r = 0; r < num_rows(i); ++r) total += row(i, r)[1];
        return total;
    }

private:
    void check_rows(const Rows& rows) const {
        for (size_t r = 0; r < rows.shape(0); ++r) {
            const int64_t* each = rows.data() + 4 * r;
            check_span("block", block_bytes_, r, each[0], each[1]);
            if (each[2] < 0) raise_value_error("a word", ">= 0", std::to_string(each[2]));
        }
    }

    const Rows& rows_of(size_t block) const { return block + 1 == count() ? last_ : rows_; }

    const int64_t block_bytes_;
    const Ids& ids_;
    const Rows &rows_, &last_;
};

void check_numbers(const char* name, size_t found, size_t expected) {
    if (found != expected)
        raise_value_error(name, std::to_string(expected), std::to_string(found));
}

// The checksums of blocks, each the sum of as many parts.
class Expected {
public:
    Expected(const nb::bytes& sums, size_t num_blocks)
        : bytes_(static_cast<const uint8_t*>(sums.data())),
          per_block_(num_blocks ? sums.size() / sizeof(uint64_t) / num_blocks : 0) {
        check_numbers("bytes of sums", sums.size(), per_block_ * num_blocks * sizeof(uint64_t));
    }

    bool is_known() const { return per_block_ > 0; }

    uint64_t of(size_t block) const {
        uint64_t sum = 0;
        for (size_t i = block * per_block_; i < (block + 1) * per_block_; ++i) {
            uint64_t part;  // little endian, as are all machines that this runs on
            std::memcpy(&part, bytes_ + i * sizeof part, sizeof part);
            sum += part;
        }
        return sum;
    }

private:
    const uint8_t* bytes_;
    size_t per_block_;
};

void check_generations(const Generations& generations, const Ids& ids, const Numbers& expected) {
    check_numbers("number of generations", expected.size(), ids.size());
    for (int64_t id : ids)
        if (id < 0 || id >= static_cast<int64_t>(generations.size()))
            raise_value_error("block id", "0.." + std::to_string(generations.size()),
                              std::to_string(id));
}

// The reader's half of the seqlock: all data read so far was read before the generations are.
bool has_stale(const Generations& generations, const Ids& ids, const Numbers& expected) {
    std::atomic_thread_fence(std::memory_order_acquire);
    for (size_t i = 0; i < ids.size(); ++i)
        if (__atomic_load_n(generations.data() + ids[i], __ATOMIC_RELAXED) != expected[i])
            return true;
    return false;
}

constexpr int64_t kStale = -2;

int64_t copy_blocks(Region destination, ConstRegion source, int64_t block_bytes, const Ids& to,
                    const Ids& from, Rows rows, Rows last_rows, Generations generations,
                    const Numbers& expected, nb::bytes sums) {
    const Blocks sources("source", source.size(), block_bytes, from, rows, last_rows);
    const Blocks targets("destination", destination.size(), block_bytes, to, rows, last_rows);
    check_numbers("number of destinations", to.size(), from.size());
    check_generations(generations, from, expected);
    const Expected wanted(sums, from.size());
    Unlocked unlocked(sources.num_bytes());
    const CopyChoice& choice = copy_choice();
    int64_t wrong = -1;
    for (size_t i = 0; i < from.size(); ++i) {
        uint64_t found = 0;
        for (size_t r = 0; r < sources.num_rows(i); ++r) {
            const int64_t* row = sources.row(i, r);
            uint8_t* target = destination.data() + targets.begin(i) + row[0];
            const uint8_t* bytes = source.data() + sources.begin(i) + row[0];
            if (wanted.is_known()) {
                BlockSum sum(row[2]);
                choice.summed_of(row[1])(target, bytes, row[1], sum);
                found += sum.value();
            } else {
                choice.of(row[1])(target, bytes, row[1]);
            }
        }
        if (wrong < 0 && wanted.is_known() && found != wanted.of(i))
            wrong = static_cast<int64_t>(i);
    }
    copies_end();
    return has_stale(generations, from, expected) ? kStale : wrong;
}

int64_t find_wrong_block(ConstRegion region, int64_t block_bytes, const Ids& ids, Rows rows,
                         Rows last_rows, nb::bytes sums) {
    const Blocks blocks("region", region.size(), block_bytes, ids, rows, last_rows);
    const Expected wanted(sums, ids.size());
    Unlocked unlocked(blocks.num_bytes());
    for (size_t i = 0; i < ids.size() && wanted.is_known(); ++i) {
        uint64_t found = 0;
        for (size_t r = 0; r < blocks.num_rows(i); ++r) {
            const int64_t* row = blocks.row(i, r);
            BlockSum sum(row[2]);
            sum.add(region.data() + blocks.begin(i) + row[0], row[1]);
            found += sum.value();
        }
        if (found != wanted.of(i)) return static_cast<int64_t>(i);
    }
    return -1;
}

// Pieces of memory that one stream of bytes goes through.
class Stream {
public:
    void add(void* base, size_t nbytes) {
        if (nbytes) vectors_.push_back({base, nbytes});
        left_ += static_cast<int64_t>(nbytes);
    }

    void add(uint8_t* region, const Blocks& blocks) {
        for (size_t i = 0; i < blocks.count(); ++i)
            for (size_t r = 0; r < blocks.num_rows(i); ++r) {
                const int64_t* row = blocks.row(i, r);
                add(region + blocks.begin(i) + row[0], row[1]);
            }
    }

    int64_t left() const { return left_; }

    void skip(int64_t nbytes) {
        left_ -= nbytes;
        while (first_ < vectors_.size() && nbytes >= static_cast<int64_t>(vectors_[first_].iov_len))
            nbytes -= static_cast<int64_t>(vectors_[first_++].iov_len);
        if (!nbytes) return;
        iovec& vector = vectors_[first_];
        vector.iov_base = static_cast<uint8_t*>(vector.iov_base) + nbytes;
        vector.iov_len -= nbytes;
    }

    // Moves what can be moved without waiting; returns an errno, or 0.
    template <class Call>
    int move(const Call& call) {
        while (left_ > 0) {
            msghdr message{};
            message.msg_iov = vectors_.data() + first_;
            message.msg_iovlen = std::min(vectors_.size() - first_, kMaxVectors);
            const ssize_t moved = call(&message);
            if (moved > 0) {
                skip(moved);
            } else if (moved == 0) {
                return ECONNRESET;  // the peer has closed its end
            } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
                return 0;
            } else if (errno != EINTR) {
                return errno;
            }
        }
        return 0;
    }

private:
    std::vector<iovec> vectors_;
    size_t first_ = 0;
    int64_t left_ = 0;
};

[[noreturn]] void raise_os_error(int error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

void check_start(int64_t start, int64_t total) {
    if (start < 0 || start > total)
        raise_value_error("start", "0.." + std::to_string(total), std::to_string(start));
}

constexpr int64_t kNotBegun = -1;

int64_t send_blocks(int fd, nb::bytes head, ConstRegion region, int64_t block_bytes,
                    const Ids& ids, Rows rows, Rows last_rows, Generations generations,
                    const Numbers& expected, nb::bytes tail, int64_t start) {
    const Blocks blocks("region", region.size(), block_bytes, ids, rows, last_rows);
    check_generations(generations, ids, expected);
    // iovec has no const form; sendmsg only reads.
    Stream first, last;
    first.add(const_cast<void*>(head.data()), head.size());
    first.add(const_cast<uint8_t*>(region.data()), blocks);
    last.add(const_cast<void*>(tail.data()), tail.size());
    const int64_t before = first.left(), total = before + last.left();
    check_start(start, total);
    first.skip(std::min(start, before));
    last.skip(std::max<int64_t>(start - before, 0));
    int error = 0;
    bool is_stale = false;
    {
        Unlocked unlocked(before);
        if (start == 0 && has_stale(generations, ids, expected)) return kNotBegun;
        const auto send = [fd](int flags) {
            return [fd, flags](msghdr* message) {
                return sendmsg(fd, message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
            };
        };
        error = first.move(send(MSG_MORE));  // the tail goes along
        if (!error && !first.left()) {
            is_stale = start <= before && has_stale(generations, ids, expected);
            if (!is_stale) error = last.move(send(0));
        }
    }
    if (error) raise_os_error(error);
    return is_stale ? kStale : total - first.left() - last.left();
}

// From how many bytes on the socket counts as readable.
void set_readable(int fd, int64_t nbytes) {
    const int value = static_cast<int>(std::max<int64_t>(nbytes, 1));
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
}

constexpr size_t kMaxHead = 64;

// What is found at the beginning of an answer, which stays there.
enum class Begin { kHead, kNothing, kOther };

Begin look_for(int fd, const nb::bytes& head, int& error) {
    uint8_t found[kMaxHead];
    const ssize_t size = recv(fd, found, head.size(), MSG_PEEK | MSG_DONTWAIT);
    if (size == 0) error = ECONNRESET;
    if (size < 0) error = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : errno;
    if (size <= 0) return Begin::kNothing;
    const bool is_head = size == static_cast<ssize_t>(head.size())
        && std::memcmp(found, head.data(), head.size()) == 0;
    return is_head ? Begin::kHead : Begin::kOther;
}

int64_t receive_blocks(int fd, nb::bytes head, Region region, int64_t block_bytes, const Ids& ids,
                       Rows rows, Rows last_rows, Region tail, int64_t start) {
    const Blocks blocks("region", region.size(), block_bytes, ids, rows, last_rows);
    if (head.size() > kMaxHead)
        raise_value_error("head", "at most " + std::to_string(kMaxHead) + " bytes",
                          std::to_string(head.size()));
    uint8_t said[kMaxHead];
    Stream stream;
    stream.add(said, head.size());
    stream.add(region.data(), blocks);
    stream.add(tail.data(), tail.size());
    const int64_t total = stream.left();
    check_start(start, total);
    stream.skip(start);
    int error = 0;
    {
        Unlocked unlocked(total);
        const Begin begin = start == 0 ? look_for(fd, head, error) : Begin::kHead;
        if (begin == Begin::kOther) return kNotBegun;
        if (begin == Begin::kHead) {
            error = stream.move(
                [fd](msghdr* message) { return recvmsg(fd, message, MSG_DONTWAIT); });
        }
        // Error verdicts are longer than the tail, so what is left arrives in any case.
        const bool has_begun = stream.left() < total;
        if (!error && has_begun && (start > 0 || stream.left() > 0))
            set_readable(fd, stream.left());
    }
    const int64_t position = total - stream.left();
    if (error && position == start) raise_os_error(error);  // else with the next call
    return position;
}

}  // namespace

void bind_block_read(nb::module_& m) {
    using namespace nb::literals;
    m.def("copy_blocks", &copy_blocks, "destination"_a.noconvert(), "source"_a.noconvert(),
          "block_bytes"_a, "destination_ids"_a, "source_ids"_a, "rows"_a.noconvert(),
          "last_rows"_a.noconvert(), "generations"_a.noconvert(), "expected"_a, "sums"_a);
    m.def("find_wrong_block", &find_wrong_block, "region"_a.noconvert(), "block_bytes"_a, "ids"_a,
          "rows"_a.noconvert(), "last_rows"_a.noconvert(), "sums"_a);
    m.def("send_blocks", &send_blocks, "fd"_a, "head"_a, "region"_a.noconvert(), "block_bytes"_a,
          "ids"_a, "rows"_a.noconvert(), "last_rows"_a.noconvert(), "generations"_a.noconvert(),
          "expected"_a, "tail"_a, "start"_a);
    m.def("receive_blocks", &receive_blocks, "fd"_a, "head"_a, "region"_a.noconvert(),
          "block_bytes"_a, "ids"_a, "rows"_a.noconvert(), "last_rows"_a.noconvert(),
          "tail"_a.noconvert(), "start"_a);
}

}  // namespace pdserve
