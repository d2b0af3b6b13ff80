#include "bind.h"

#include <chrono>
#include <string>

#include "../tensor_view.h"

namespace nb = nanobind;

namespace pdserve {

namespace ranks {

namespace {

constexpr int kMostRanks = 64;

void* checked(nb::handle object, int rank, int num_ranks) {
    if (num_ranks < 1 || num_ranks > kMostRanks) {
        raise_value_error("num_ranks", "1 to " + std::to_string(kMostRanks),
            std::to_string(num_ranks));
    }
    if (rank < 0 || rank >= num_ranks) {
        raise_value_error("rank", "0 to " + std::to_string(num_ranks - 1), std::to_string(rank));
    }
    const TensorView memory(object, "memory", Access::kWrite);
    memory.expect_type({ElementType::kUInt8});
    memory.expect_shape({-1}, "[num_bytes]");
    memory.expect_contiguous();
    const auto needed = static_cast<int64_t>(Group::memory_bytes(num_ranks));
    if (memory.size(0) < needed || reinterpret_cast<uintptr_t>(memory.data<void>()) % 64 != 0) {
        raise_value_error("memory", std::to_string(needed) + " bytes, aligned to 64",
            std::to_string(memory.size(0)));
    }
    return memory.data<void>();
}

}  // namespace

OwnedGroup::OwnedGroup(nb::object memory, int rank, int num_ranks)
    : memory_(std::move(memory)), group_(checked(memory_, rank, num_ranks), rank, num_ranks) {}

}  // namespace ranks

void bind_ranks(nb::module_& m) {
    using nb::arg;
    using ranks::OwnedGroup;
    nb::exception<ranks::RanksLost>(m, "RanksLost", PyExc_RuntimeError);
    nb::class_<OwnedGroup>(m, "RankGroup", "One of the processes that compute steps together.")
        .def(nb::init<nb::object, int, int>(), arg("memory"), arg("rank"), arg("num_ranks"))
        .def_static("memory_bytes", &ranks::Group::memory_bytes, arg("num_ranks"))
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
        .def("give_up", [](OwnedGroup& self) { self.group().give_up(); })
        .def_prop_ro("is_lost", [](OwnedGroup& self) { return self.group().is_lost(); });
}

}  // namespace pdserve
