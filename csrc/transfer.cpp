// The native half of the KV transfer: checked entry points that move spans without the interpreter
// lock. A span is one run of bytes; all of them are checked before the first byte moves.

#include "transfer.h"

#include <algorithm>
#include <atomic>
#include <string>

#include <nanobind/ndarray.h>

#include "span_stream.h"
#include "stream_copy.h"
#include "tensor_view.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using Region = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstRegion = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CopySpans = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using StreamSpans = nb::ndarray<const int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Flag = nb::ndarray<const uint8_t, nb::shape<1>, nb::c_contig, nb::device::cpu>;
using BlockIds = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Generations = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// How much is copied between two checks of the cancel flag: about half a millisecond.
constexpr int64_t kCopyPiece = 4 << 20;

void check_span(const char* region, size_t region_bytes, size_t row, int64_t offset, int64_t nbytes) {
    const auto size = static_cast<int64_t>(region_bytes);
    if (offset >= 0 && nbytes >= 0 && offset <= size && nbytes <= size - offset) return;
    raise_value_error("span " + std::to_string(row) + " of the " + region,
                      "a range within " + std::to_string(size) + " bytes",
                      std::to_string(nbytes) + " bytes at offset " + std::to_string(offset));
}

int64_t copy_checked(uint8_t* to, const uint8_t* from, const int64_t* rows, size_t count,
                     CancelFlag flag) {
    int64_t copied = 0;
    int64_t since_look = kCopyPiece;
    for (size_t i = 0; i < count; ++i) {
        const int64_t nbytes = rows[3 * i + 2];
        for (int64_t done = 0, piece; done < nbytes; done += piece) {
            if (since_look >= kCopyPiece) {
                if (flag.is_set()) return copied;
                since_look = 0;
            }
            piece = std::min(nbytes - done, kCopyPiece);
            stream_copy(to + rows[3 * i + 1] + done, from + rows[3 * i] + done, piece);
            copied += piece;
            since_look += piece;
        }
    }
    return copied;
}

int64_t copy_spans(Region destination, ConstRegion source, CopySpans spans, Flag cancel) {
    const int64_t* rows = spans.data();
    const size_t count = spans.shape(0);
    for (size_t i = 0; i < count; ++i) {
        check_span("source", source.size(), i, rows[3 * i], rows[3 * i + 2]);
        check_span("destination", destination.size(), i, rows[3 * i + 1], rows[3 * i + 2]);
    }
    const CancelFlag flag(cancel.data());
    nb::gil_scoped_release unlocked;
    int64_t copied = copy_checked(destination.data(), source.data(), rows, count, flag);
    stream_copy_end();
    return copied;
}

int64_t stream(Direction direction, int fd, uint8_t* base, size_t region_bytes, StreamSpans spans,
               int64_t start, Flag cancel, double slice_s) {
    const int64_t* rows = spans.data();
    const size_t count = spans.shape(0);
    for (size_t i = 0; i < count; ++i)
        check_span("region", region_bytes, i, rows[2 * i], rows[2 * i + 1]);
    if (start < 0) raise_value_error("start", ">= 0", std::to_string(start));
    if (!(slice_s >= 0 && slice_s <= 60))
        raise_value_error("slice_s", "0..60 seconds", std::to_string(slice_s));
    const auto slice = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(slice_s));
    const CancelFlag flag(cancel.data());
    StreamEnd end;
    {
        nb::gil_scoped_release unlocked;
        end = stream_spans(direction, fd, base, {rows, count}, start, flag, slice);
    }
    if (end.error != 0) {
        errno = end.error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return end.position;
}

int64_t send_spans(int fd, ConstRegion region, StreamSpans spans, int64_t start, Flag cancel,
                   double slice_s) {
    // iovec has no const form; sendmsg only reads.
    auto* base = const_cast<uint8_t*>(region.data());
    return stream(Direction::kSend, fd, base, region.size(), spans, start, cancel, slice_s);
}

int64_t recv_spans(int fd, Region region, StreamSpans spans, int64_t start, Flag cancel,
                   double slice_s) {
    return stream(Direction::kReceive, fd, region.data(), region.size(), spans, start, cancel,
                  slice_s);
}

int64_t find_stale(Generations generations, BlockIds block_ids, Generations expected) {
    const size_t count = block_ids.size();
    if (expected.size() != count)
        raise_value_error("generations", "one for each of " + std::to_string(count) + " blocks",
                          std::to_string(expected.size()));
    for (size_t i = 0; i < count; ++i) {
        const int64_t id = block_ids.data()[i];
        if (id < 0 || id >= static_cast<int64_t>(generations.size()))
            raise_value_error("block id", "0.." + std::to_string(generations.size()),
                              std::to_string(id));
    }
    // The reader's half of the seqlock: all data read so far was read before what follows.
    std::atomic_thread_fence(std::memory_order_acquire);
    for (size_t i = 0; i < count; ++i) {
        const uint64_t* now = generations.data() + block_ids.data()[i];
        if (__atomic_load_n(now, __ATOMIC_RELAXED) != expected.data()[i])
            return static_cast<int64_t>(i);
    }
    return -1;
}

}  // namespace

void bind_transfer(nb::module_& m) {
    using namespace nb::literals;
    m.def("copy_spans", &copy_spans, "destination"_a.noconvert(), "source"_a.noconvert(),
          "spans"_a.noconvert(), "cancel"_a.noconvert());
    m.def("send_spans", &send_spans, "fd"_a, "region"_a.noconvert(), "spans"_a.noconvert(),
          "start"_a, "cancel"_a.noconvert(), "slice_s"_a);
    m.def("recv_spans", &recv_spans, "fd"_a, "region"_a.noconvert(), "spans"_a.noconvert(),
          "start"_a, "cancel"_a.noconvert(), "slice_s"_a);
    m.def("find_stale", &find_stale, "generations"_a.noconvert(), "block_ids"_a.noconvert(),
          "expected"_a.noconvert());
}

}  // namespace pdserve
