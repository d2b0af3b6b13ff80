// Splits numbers of 2 or 4 bytes into their uppermost bytes, with sign and exponent, and the rest,
// which is as good as random; and joins them.

#include "planes.h"

#include <cstdint>
#include <string>
#include <type_traits>

#include <nanobind/ndarray.h>

#include "../tensor_view.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Calls `move` with the width as a constant, for which the compiler makes vectors.
template <class Move>
void with_width(int64_t width, Move move) {
    nb::gil_scoped_release unlocked;
    if (width == 2)
        move(std::integral_constant<int, 2>());
    else
        move(std::integral_constant<int, 4>());
}

// Returns how many numbers there are.
size_t check_planes(size_t numbers_bytes, size_t planes_bytes, int64_t width) {
    if (width != 2 && width != 4) raise_value_error("width", "2 or 4 bytes", std::to_string(width));
    if (numbers_bytes % width != 0)
        raise_value_error("numbers", "whole ones", std::to_string(numbers_bytes) + " bytes");
    if (planes_bytes != numbers_bytes)
        raise_value_error("planes", std::to_string(numbers_bytes) + " bytes",
                          std::to_string(planes_bytes));
    return numbers_bytes / width;
}

void split_planes(ConstBytes numbers, Bytes planes, int64_t width) {
    const size_t count = check_planes(numbers.size(), planes.size(), width);
    const uint8_t* from = numbers.data();
    uint8_t *top = planes.data(), *rest = top + count;
    with_width(width, [=](auto bytes) {
        constexpr int kBytes = bytes;
        for (size_t i = 0; i < count; ++i) {
            for (int byte = 0; byte < kBytes - 1; ++byte)
                rest[i * (kBytes - 1) + byte] = from[i * kBytes + byte];
            top[i] = from[i * kBytes + kBytes - 1];
        }
    });
}

void join_planes(ConstBytes planes, Bytes numbers, int64_t width) {
    const size_t count = check_planes(numbers.size(), planes.size(), width);
    const uint8_t *top = planes.data(), *rest = top + count;
    uint8_t* to = numbers.data();
    with_width(width, [=](auto bytes) {
        constexpr int kBytes = bytes;
        for (size_t i = 0; i < count; ++i) {
            for (int byte = 0; byte < kBytes - 1; ++byte)
                to[i * kBytes + byte] = rest[i * (kBytes - 1) + byte];
            to[i * kBytes + kBytes - 1] = top[i];
        }
    });
}

}  // namespace

void bind_planes(nb::module_& m) {
    using namespace nb::literals;
    m.def("split_planes", &split_planes, "numbers"_a.noconvert(), "planes"_a.noconvert(),
          "width"_a);
    m.def("join_planes", &join_planes, "planes"_a.noconvert(), "numbers"_a.noconvert(),
          "width"_a);
}

}  // namespace pdserve
