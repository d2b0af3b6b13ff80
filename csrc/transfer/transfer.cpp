// The native half of the KV transfer: checked entry points that move spans without the interpreter
// lock. A span is one run of bytes; all of them are checked before the first byte moves.

#include "transfer.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <string>

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "../tensor_view.h"
#include "checks.h"
#include "copy_choice.h"
#include "span_stream.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using Region = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstRegion = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CopySpans = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using StreamSpans = nb::ndarray<const int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Flag = nb::ndarray<const uint8_t, nb::shape<1>, nb::c_contig, nb::device::cpu>;
using Spans = nb::ndarray<nb::numpy, int64_t, nb::shape<-1, 3>>;
using BlockIds = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Generations = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// How much is copied between two checks of the cancel flag: about half a millisecond.
constexpr int64_t kCopyPiece = 4 << 20;

// Copies the spans' bytes from position `start` up to `end`, and returns the position reached.
// `forced`: the way of all spans; null: for each the fastest of its size.
int64_t copy_checked(uint8_t* to, const uint8_t* from, SpanTable spans, int64_t start, int64_t end,
                     CancelFlag flag, const CopyWay* forced) {
    const CopyChoice& choice = copy_choice();
    int64_t position = start, first = 0, since_look = kCopyPiece;
    for (size_t i = 0; i < spans.count && position < end; ++i) {
        const int64_t* row = spans.rows + 3 * i;
        const int64_t last = std::min(first + row[2], end);
        const Copy copy = forced ? forced->copy : choice.of(row[2]);
        while (position < last) {
            if (since_look >= kCopyPiece) {
                if (flag.is_set()) return position;
                since_look = 0;
            }
            const int64_t done = position - first, piece = std::min(last - position, kCopyPiece);
            copy(to + row[1] + done, from + row[0] + done, piece);
            position += piece;
            since_look += piece;
        }
        first += row[2];
    }
    return position;
}

int64_t copy_spans(Region destination, ConstRegion source, CopySpans spans, Flag cancel,
                   int64_t start, int64_t max_bytes, const std::string& way) {
    const int64_t* rows = spans.data();
    const size_t count = spans.shape(0);
    int64_t total = 0;
    for (size_t i = 0; i < count; ++i) {
        check_span("source", source.size(), i, rows[3 * i], rows[3 * i + 2]);
        check_span("destination", destination.size(), i, rows[3 * i + 1], rows[3 * i + 2]);
        total += rows[3 * i + 2];
    }
    if (start < 0 || start > total)
        raise_value_error("start", "0.." + std::to_string(total), std::to_string(start));
    if (max_bytes < 0) raise_value_error("max_bytes", ">= 0", std::to_string(max_bytes));
    const CopyWay* forced = find_way(way);
    const CancelFlag flag(cancel.data());
    nb::gil_scoped_release unlocked;
    const int64_t end = start + std::min(total - start, max_bytes);
    const int64_t position =
        copy_checked(destination.data(), source.data(), {rows, count}, start, end, flag, forced);
    copies_end();
    return position;
}

// span bytes |-> way |-> bytes per second
using CopyRates = std::map<size_t, std::map<std::string, double>>;

CopyRates copy_rates() {
    nb::gil_scoped_release unlocked;
    const CopyChoice& choice = copy_choice();
    CopyRates found;
    for (size_t size = 0; size < kSpanBytes.size(); ++size)
        for (size_t way = 0; way < kCopyWays.size(); ++way) {
            const std::string name = kCopyWays[way].name;
            found[kSpanBytes[size]][name] = choice.plain.rates[size][way];
            found[kSpanBytes[size]][name + ", summed"] = choice.summed.rates[size][way];
        }
    return found;
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

Spans block_spans(BlockIds source_ids, BlockIds destination_ids, int64_t block_bytes, int64_t offset,
                  int64_t nbytes, bool joins) {
    const size_t count = source_ids.size();
    if (destination_ids.size() != count)
        raise_value_error("destination_ids", std::to_string(count) + " ids",
                          std::to_string(destination_ids.size()));
    auto* rows = new int64_t[3 * count];
    nb::capsule owner(rows, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
    size_t filled = 0;
    for (size_t i = 0; i < count; ++i) {
        const int64_t from = source_ids.data()[i] * block_bytes + offset;
        const int64_t to = destination_ids.data()[i] * block_bytes + offset;
        int64_t* last = filled > 0 ? rows + 3 * (filled - 1) : rows;
        if (joins && filled > 0 && last[0] + last[2] == from && last[1] + last[2] == to) {
            last[2] += nbytes;
        } else {
            int64_t* row = rows + 3 * filled++;
            row[0] = from, row[1] = to, row[2] = nbytes;
        }
    }
    return Spans(rows, {filled, 3}, owner);
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
          "spans"_a.noconvert(), "cancel"_a.noconvert(), "start"_a = 0,
          "max_bytes"_a = std::numeric_limits<int64_t>::max(), "way"_a = "");
    m.def("copy_rates", &copy_rates);
    m.def("send_spans", &send_spans, "fd"_a, "region"_a.noconvert(), "spans"_a.noconvert(),
          "start"_a, "cancel"_a.noconvert(), "slice_s"_a);
    m.def("recv_spans", &recv_spans, "fd"_a, "region"_a.noconvert(), "spans"_a.noconvert(),
          "start"_a, "cancel"_a.noconvert(), "slice_s"_a);
    m.def("block_spans", &block_spans, "source_ids"_a.noconvert(), "destination_ids"_a.noconvert(),
          "block_bytes"_a, "offset"_a, "nbytes"_a, "joins"_a = true);
    m.def("find_stale", &find_stale, "generations"_a.noconvert(), "block_ids"_a.noconvert(),
          "expected"_a.noconvert());
}

}  // namespace pdserve
