#include "bind.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/stl/vector.h>

#include "../tensor_view.h"
#include "slot.h"

namespace nb = nanobind;

namespace pdserve {

namespace ranks {

namespace {

constexpr int kMostRanks = 64;

int num_ranks_of(const std::vector<int>& stages) {
    int num_ranks = 0;
    for (int size : stages) num_ranks += size < 1 ? kMostRanks + 1 : std::min(size, kMostRanks + 1);
    if (num_ranks < 1 || num_ranks > kMostRanks) {
        raise_value_error("stages", "1 to " + std::to_string(kMostRanks) + " ranks",
            std::to_string(stages.size()) + " stages");
    }
    return num_ranks;
}

char* checked(nb::handle object, int rank, const std::vector<int>& stages) {
    const int num_ranks = num_ranks_of(stages);
    if (rank < 0 || rank >= num_ranks) {
        raise_value_error("rank", "0 to " + std::to_string(num_ranks - 1), std::to_string(rank));
    }
    const TensorView memory(object, "memory", Access::kWrite);
    memory.expect_type({ElementType::kUInt8});
    memory.expect_shape({-1}, "[num_bytes]");
    memory.expect_contiguous();
    const auto needed = static_cast<int64_t>(Group::memory_bytes(stages));
    if (memory.size(0) < needed || reinterpret_cast<uintptr_t>(memory.data<char>()) % 64 != 0) {
        raise_value_error("memory", std::to_string(needed) + " bytes, aligned to 64",
            std::to_string(memory.size(0)));
    }
    return memory.data<char>();
}

// Rows of a part, for a link that must be there.
TensorView rows_of(nb::handle object, Access access, const StageLink* link) {
    if (link == nullptr) throw std::invalid_argument("there is no stage there");
    TensorView rows(object, "rows", access);
    rows.expect_type({ElementType::kFloat32});
    rows.expect_shape({-1, -1}, "[num_rows, width]");
    rows.expect_contiguous();
    if (rows.size(1) < 1 || rows.size(0) > rows_of_part(rows.size(1))) {
        raise_value_error("rows", "those of a part", std::to_string(rows.size(0)));
    }
    return rows;
}

}  // namespace

OwnedGroup::OwnedGroup(nb::object memory, int rank, const std::vector<int>& stages)
    : memory_(std::move(memory)), group_(checked(memory_, rank, stages), rank, stages) {}

}  // namespace ranks

void bind_ranks(nb::module_& m) {
    using nb::arg;
    using ranks::OwnedGroup;
    nb::exception<ranks::RanksLost>(m, "RanksLost", PyExc_RuntimeError);
    nb::class_<OwnedGroup>(m, "RankGroup", "One of the processes that compute steps together.")
        .def(nb::init<nb::object, int, const std::vector<int>&>(), arg("memory"), arg("rank"),
            arg("stages"))
        .def_static(
            "memory_bytes",
            [](const std::vector<int>& stages) {
                ranks::num_ranks_of(stages);
                return ranks::Group::memory_bytes(stages);
            },
            arg("stages"))
        .def("say_ready", [](OwnedGroup& self) { self.group().say_ready(); })
        .def(
            "wait_ready",
            [](OwnedGroup& self, double seconds) {
                const std::chrono::microseconds most(static_cast<int64_t>(seconds * 1e6));
                nb::gil_scoped_release release;
                return self.group().wait_ready(most);
            },
            arg("seconds"), "Wait until all ranks are ready; whether they are.")
        .def(
            "wait_step",
            [](OwnedGroup& self, uint32_t last) {
                nb::gil_scoped_release release;
                return self.group().wait_step(last);
            },
            arg("last"), "Wait for the step after `last`, and return its number.")
        .def("begin_step", [](OwnedGroup& self) { self.group().begin_step(); })
        .def(
            "end_step",
            [](OwnedGroup& self) {
                nb::gil_scoped_release release;
                self.group().end_step();
            },
            "Wait until all ranks have computed the step.")
        .def("tell_layers",
            [](OwnedGroup& self, int64_t num_layers) { self.group().tell_layers(num_layers); },
            arg("num_layers"))
        .def_static("rows_of_part", &ranks::rows_of_part, arg("width"))
        .def(
            "give",
            [](OwnedGroup& self, nb::handle rows) {
                const TensorView view = ranks::rows_of(rows, Access::kRead, self.group().next());
                nb::gil_scoped_release release;
                self.group().next()->give(view.data<float>(), view.size(0) * view.size(1));
            },
            arg("rows"), "Give a part's rows to the next stage.")
        .def(
            "take",
            [](OwnedGroup& self, nb::handle rows) {
                const TensorView view = ranks::rows_of(rows, Access::kWrite, self.group().before());
                nb::gil_scoped_release release;
                self.group().before()->take(view.data<float>(), view.size(0) * view.size(1));
            },
            arg("rows"), "Wait for a part's rows from the stage before.")
        .def("give_up", [](OwnedGroup& self) { self.group().give_up(); })
        .def_prop_ro("is_lost", [](OwnedGroup& self) { return self.group().is_lost(); });
}

}  // namespace pdserve
