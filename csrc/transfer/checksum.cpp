// Checked entry points of block_sum.h: everything is checked before the first byte is read.

#include "checksum.h"

#include <algorithm>
#include <limits>
#include <string>

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "../tensor_view.h"
#include "block_sum.h"
#include "checks.h"
#include "copy_choice.h"
#include "span_stream.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using Region = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstRegion = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CopySpans = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<const int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Flag = nb::ndarray<const uint8_t, nb::shape<1>, nb::c_contig, nb::device::cpu>;
using FoundSums = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstSums = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<nb::numpy, uint64_t, nb::ndim<2>>;

// How much is copied between two checks of the cancel flag: about half a millisecond.
constexpr int64_t kPiece = 4 << 20;

void check_place(size_t row, int64_t word, int64_t index, size_t num_sums) {
    if (word >= 0 && index >= 0 && static_cast<size_t>(index) < num_sums) return;
    raise_value_error("place " + std::to_string(row),
                      "a word >= 0 and one of " + std::to_string(num_sums) + " sums",
                      std::to_string(word) + " and " + std::to_string(index));
}

int64_t copy_summed(Region destination, ConstRegion source, CopySpans spans, Places places,
                    FoundSums sums, Flag cancel, int64_t start, int64_t max_bytes,
                    const std::string& way) {
    const size_t count = spans.shape(0);
    const int64_t *rows = spans.data(), *where = places.data();
    if (places.shape(0) != count)
        raise_value_error("places", std::to_string(count), std::to_string(places.shape(0)));
    int64_t total = 0;
    for (size_t i = 0; i < count; ++i) {
        check_span("source", source.size(), i, rows[3 * i], rows[3 * i + 2]);
        check_span("destination", destination.size(), i, rows[3 * i + 1], rows[3 * i + 2]);
        check_place(i, where[2 * i], where[2 * i + 1], sums.size());
        total += rows[3 * i + 2];
    }
    if (start < 0 || start > total)
        raise_value_error("start", "0.." + std::to_string(total), std::to_string(start));
    if (max_bytes < static_cast<int64_t>(kLine))
        raise_value_error("max_bytes", ">= " + std::to_string(kLine), std::to_string(max_bytes));
    const CopyWay* forced = find_way(way);
    const CancelFlag flag(cancel.data());
    uint8_t* to = destination.data();
    const uint8_t* from = source.data();
    nb::gil_scoped_release unlocked;
    const CopyChoice& choice = copy_choice();
    const int64_t end = start + std::min(total - start, max_bytes);
    int64_t position = start, first = 0, since_look = kPiece;
    for (size_t i = 0; i < count && position < end; first += rows[3 * i++ + 2]) {
        const int64_t* row = rows + 3 * i;
        int64_t done = position - first;
        if (done >= row[2]) continue;
        const SummedCopy copy = forced ? forced->summed : choice.summed_of(row[2]);
        BlockSum sum(where[2 * i] + done / 8);
        while (done < row[2]) {
            // In whole lines, except for the last one: so a word is never cut in two.
            int64_t piece = std::min({row[2] - done, kPiece, end - first - done});
            if (piece < row[2] - done) piece -= piece % static_cast<int64_t>(kLine);
            if (since_look >= kPiece) {
                if (flag.is_set()) piece = 0;
                since_look = 0;
            }
            if (piece <= 0) break;
            copy(to + row[1] + done, from + row[0] + done, piece, sum);
            done += piece;
            since_look += piece;
        }
        sums.data()[where[2 * i + 1]] += sum.value();
        position = first + done;
        if (done < row[2]) break;
    }
    copies_end();
    return position;
}

Sums sum_blocks(ConstRegion region, Offsets offsets, Rows rows, int64_t num_sums) {
    const size_t num_blocks = offsets.size(), num_rows = rows.shape(0);
    const int64_t *begins = offsets.data(), *table = rows.data();
    if (num_sums <= 0) raise_value_error("num_sums", "> 0", std::to_string(num_sums));
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
    for (size_t row = 0; row < num_rows; ++row) {
        const int64_t* each = table + 4 * row;
        check_span("block", std::numeric_limits<int64_t>::max() / 2, row, each[0], each[1]);
        check_place(row, each[2], each[3], num_sums);
        first = std::min(first, each[0]);
        last = std::max(last, each[0] + each[1]);
    }
    for (size_t i = 0; i < num_blocks && num_rows; ++i) {
        if (begins[i] < 0) raise_value_error("offset", ">= 0", std::to_string(begins[i]));
        check_span("region", region.size(), i, begins[i] + first, last - first);
    }
    auto* sums = new uint64_t[num_blocks * num_sums]();
    nb::capsule owner(sums, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
    {
        nb::gil_scoped_release unlocked;
        for (size_t i = 0; i < num_blocks; ++i)
            for (size_t row = 0; row < num_rows; ++row) {
                const int64_t* each = table + 4 * row;
                BlockSum sum(each[2]);
                sum.add(region.data() + begins[i] + each[0], each[1]);
                sums[i * num_sums + each[3]] += sum.value();
            }
    }
    return Sums(sums, {num_blocks, static_cast<size_t>(num_sums)}, owner);
}

int64_t find_wrong(ConstSums found, ConstSums expected, int64_t per_block) {
    const size_t count = found.size();
    if (per_block <= 0 || expected.size() != count * static_cast<size_t>(per_block))
        raise_value_error("expected", std::to_string(count) + " x " + std::to_string(per_block),
                          std::to_string(expected.size()));
    const uint64_t* parts = expected.data();
    for (size_t i = 0; i < count; ++i) {
        uint64_t sum = 0;
        for (int64_t part = 0; part < per_block; ++part) sum += *parts++;
        if (sum != found.data()[i]) return static_cast<int64_t>(i);
    }
    return -1;
}

}  // namespace

void bind_checksum(nb::module_& m) {
    using namespace nb::literals;
    m.def("copy_summed", &copy_summed, "destination"_a.noconvert(), "source"_a.noconvert(),
          "spans"_a.noconvert(), "places"_a.noconvert(), "sums"_a.noconvert(),
          "cancel"_a.noconvert(), "start"_a = 0,
          "max_bytes"_a = std::numeric_limits<int64_t>::max(), "way"_a = "");
    m.def("sum_blocks", &sum_blocks, "region"_a.noconvert(), "offsets"_a.noconvert(),
          "rows"_a.noconvert(), "num_sums"_a);
    m.def("find_wrong", &find_wrong, "found"_a.noconvert(), "expected"_a.noconvert(),
          "per_block"_a);
}

}  // namespace pdserve
