#include "bind.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>

#include <nanobind/stl/string.h>

#include "../tensor_view.h"
#include "ledger.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

using places::Ledger;
using std::chrono::milliseconds;

constexpr double kMostSeconds = 1e8;  // as nanoseconds they fit

int64_t ns(double seconds) {
    return static_cast<int64_t>(1e9 * std::clamp(seconds, -kMostSeconds, kMostSeconds));
}

milliseconds ms(double seconds) {
    return milliseconds(static_cast<int64_t>(1e3 * std::clamp(seconds, 0.0, 3600.0)));
}

int64_t checked(const char* name, int64_t bytes) {
    if (bytes < 0) raise_value_error(name, ">= 0", std::to_string(bytes));
    return bytes;
}

void make(Ledger* self, const std::string& path, int place, int64_t budget) {
    if (place < 0 || place >= places::kMostPlaces) {
        raise_value_error("place", "0 to " + std::to_string(places::kMostPlaces - 1),
            std::to_string(place));
    }
    if (budget <= 0) raise_value_error("budget", "> 0", std::to_string(budget));
    try {
        new (self) Ledger(path, place, budget);
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw nb::python_error();
    }
}

}  // namespace

void bind_places(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Ledger>(m, "Ledger", "What the places of a node share: memory and turns.")
        .def("__init__", &make, "path"_a, "place"_a, "budget"_a)
        .def_prop_ro("budget", &Ledger::budget)
        .def_prop_ro("held", &Ledger::held)
        .def_prop_ro("room", &Ledger::room)
        .def_prop_ro("reach", &Ledger::reach)
        .def_prop_ro("owed", &Ledger::owed)
        .def_prop_ro("changes", &Ledger::changes)
        .def_prop_ro("num_waiting", &Ledger::num_waiting)
        .def("enter",
             [](Ledger& self, int64_t weights, int64_t floor) {
                 return self.enter(checked("weights", weights), checked("floor", floor));
             }, "weights"_a, "floor"_a)
        .def("fits",
             [](const Ledger& self, int64_t weights, int64_t floor) {
                 return self.fits(checked("weights", weights), checked("floor", floor));
             }, "weights"_a, "floor"_a)
        .def("leave", &Ledger::leave)
        .def("take", [](Ledger& self, int64_t n) { return self.take(checked("num_bytes", n)); }, "num_bytes"_a)
        .def("give", [](Ledger& self, int64_t n) { self.give(checked("num_bytes", n)); }, "num_bytes"_a)
        .def("set_used", [](Ledger& self, int64_t n) { self.set_used(checked("num_bytes", n)); }, "num_bytes"_a)
        .def("set_wanted", [](Ledger& self, int64_t n) { self.set_wanted(checked("num_bytes", n)); },
             "num_bytes"_a)
        .def("clear_dead", &Ledger::clear_dead)
        .def("await_change",
             [](Ledger& self, uint32_t seen, double within_s) {
                 nb::gil_scoped_release unlocked;
                 return self.await_change(seen, ms(within_s));
             }, "seen"_a, "within_s"_a)
        .def("try_turn", [](Ledger& self, double lease_s) { return self.try_turn(ns(lease_s)); },
             "lease_s"_a)
        .def("await_turn",
             [](Ledger& self, double due_s, double lease_s, double within_s) {
                 nb::gil_scoped_release unlocked;
                 return self.await_turn(ns(due_s), ns(lease_s), ms(within_s));
             }, "due_s"_a, "lease_s"_a, "within_s"_a)
        .def("pass_turn",
             [](Ledger& self, bool has_more, double due_s, double lease_s) {
                 return self.pass_turn(has_more, ns(due_s), ns(lease_s));
             }, "has_more"_a, "due_s"_a = 0.0, "lease_s"_a = 0.0);
}

}  // namespace pdserve
