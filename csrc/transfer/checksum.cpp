// Folds rows of bytes into 64 bits, in order. How the rows are cut into ranges makes no difference,
// so two layouts of the same KV have the same checksum. Detects faults of memory, networks and
// plans; it does not protect against forgery.

#include "checksum.h"

#include <cstring>
#include <string>

#include <nanobind/ndarray.h>

#include "../tensor_view.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using ConstRegion = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ranges = nb::ndarray<const int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>;

// Multiplication carries bits upwards only, so the upper half is folded back each time (as in
// splitmix64).
inline uint64_t mix(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
    return sum ^ (sum >> 32);
}

uint64_t fold_row(uint64_t sum, const uint8_t* row, size_t nbytes) {
    size_t i = 0;
    for (uint64_t word; i + sizeof word <= nbytes; i += sizeof word) {
        std::memcpy(&word, row + i, sizeof word);
        sum = mix(sum, word);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, row + i, nbytes - i);
    return i < nbytes ? mix(sum, rest) : sum;
}

Sums checksum_ranges(ConstRegion region, Ranges ranges, int64_t row_bytes, int64_t num_groups) {
    const size_t count = ranges.shape(0);
    const int64_t* rows = ranges.data();
    const auto size = static_cast<int64_t>(region.size());
    if (row_bytes <= 0) raise_value_error("row_bytes", "> 0", std::to_string(row_bytes));
    if (num_groups <= 0 || count % num_groups)
        raise_value_error("num_groups", "a divisor of " + std::to_string(count),
                          std::to_string(num_groups));
    for (size_t i = 0; i < count; ++i) {
        const int64_t offset = rows[2 * i], nbytes = rows[2 * i + 1];
        if (offset < 0 || nbytes < 0 || offset > size || nbytes > size - offset ||
            nbytes % row_bytes)
            raise_value_error("range " + std::to_string(i),
                              "whole rows within " + std::to_string(size) + " bytes",
                              std::to_string(nbytes) + " bytes at offset " + std::to_string(offset));
    }
    auto* sums = new uint64_t[num_groups];
    nb::capsule owner(sums, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
    {
        nb::gil_scoped_release unlocked;
        const size_t per_group = count / num_groups;
        for (int64_t group = 0; group < num_groups; ++group) {
            uint64_t sum = 0;
            for (size_t i = group * per_group; i < (group + 1) * per_group; ++i)
                for (int64_t done = 0; done < rows[2 * i + 1]; done += row_bytes)
                    sum = fold_row(sum, region.data() + rows[2 * i] + done, row_bytes);
            sums[group] = sum;
        }
    }
    return Sums(sums, {static_cast<size_t>(num_groups)}, owner);
}

}  // namespace

void bind_checksum(nb::module_& m) {
    using namespace nb::literals;
    m.def("checksum_ranges", &checksum_ranges, "region"_a.noconvert(), "ranges"_a.noconvert(),
          "row_bytes"_a, "num_groups"_a,
          "Checksums of num_groups equal groups of ranges (offset, nbytes), each of whole rows.");
}

}  // namespace pdserve
