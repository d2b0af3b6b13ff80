#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <string>
#include <utility>

#include "tensor_view.h"
#include "threads/core_split.h"
#include "threads/thread_pool.h"
#include "threads/watchdog.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

constexpr int kMaxThreads = 1024;

}  // namespace

Variant variant_from(const char* name) {
    if (*name == '\0') return best_variant();
    std::string runnable;
    for (Variant variant : kVariants) {
        if (!can_run(variant)) continue;
        if (std::string(name) == variant_name(variant)) return variant;
        runnable += (runnable.empty() ? "" : ", ") + std::string(variant_name(variant));
    }
    raise_value_error("variant", "one of " + runnable + " on this CPU", name);
}

void bind_cpu(nb::module_& m) {
    m.def(
        "cpu_features",
        [] {
            nb::dict result;
            const Features& features = cpu_features();
#if defined(__aarch64__)
            result["neon_bf16"] = features.neon_bf16;
            result["neon_dot"] = features.neon_dot;
            result["neon_i8mm"] = features.neon_i8mm;
#else
            result["avx2"] = features.avx2;
            result["avx512f"] = features.avx512f;
            result["avx512_bf16"] = features.avx512_bf16;
            result["avx512_vnni"] = features.avx512_vnni;
            result["amx_bf16"] = features.amx_bf16;
#endif
            return result;
        },
        "Instruction set extensions of this CPU that matter to the kernels.");
    m.def(
        "kernel_variants",
        [] {
            nb::list result;
            for (Variant variant : kVariants) {
                if (can_run(variant)) result.append(nb::str(variant_name(variant)));
            }
            return result;
        },
        "The kernel builds this CPU can run, best first; the first is used.");
}

void bind_threads(nb::module_& m) {
    m.def(
        "set_num_threads",
        [](int num_threads) {
            if (num_threads < 1 || num_threads > kMaxThreads) {
                raise_value_error("num_threads", "1 to " + std::to_string(kMaxThreads),
                    std::to_string(num_threads));
            }
            nb::gil_scoped_release release;
            ThreadPool::instance().set_num_threads(num_threads);
        },
        nb::arg("num_threads"), "How many threads share one kernel call, the caller included.");
    m.def(
        "num_threads", [] { return ThreadPool::instance().num_threads(); },
        "How many threads share one kernel call; at first the cores this process may use.");
}

void bind_core_share(nb::module_& m) {
    using Share = std::shared_ptr<CoreShare>;
    nb::class_<CoreShare>(m, "CoreShare", "The cores that a thread may use for its kernel calls.")
        .def_prop_ro("num_cores", &CoreShare::num_cores)
        .def(
            "ask",
            [](CoreShare& self, int num_cores) {
                const int most = self.num_cores() - 1;
                if (num_cores < 1 || num_cores > most) {
                    raise_value_error(
                        "num_cores", "1 to " + std::to_string(most), std::to_string(num_cores));
                }
                self.ask(num_cores);
            },
            nb::arg("num_cores"), "A step begins.")
        .def("release", &CoreShare::release, "Nothing is computed.")
        .def_prop_ro("asked_by_other", &CoreShare::asked_by_other)
        .def_prop_ro("allowed", &CoreShare::allowed)
        .def_prop_ro("mean_cores", &CoreShare::mean_cores);
    m.def(
        "split_cores",
        [](int num_cores) {
            if (num_cores < 2 || num_cores > CoreShare::kMostCores) {
                raise_value_error("num_cores", "2 to " + std::to_string(CoreShare::kMostCores),
                    std::to_string(num_cores));
            }
            return CoreShare::split(num_cores);
        },
        nb::arg("num_cores"), "The share of what asks for cores, and of what has the rest.");
    m.def(
        "use_core_share",
        [](Share share) {
            nb::gil_scoped_release release;
            ThreadPool::own(std::move(share));
        },
        nb::arg("share").none(), "Have kernel calls of this thread use workers of their own.");
}

void bind_watchdog(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<StillTime>(m, "StillTime", "For how long a thread has stood still.")
        .def(nb::init<double>(), "tick_s"_a)
        .def(
            "look",
            [](StillTime& self, double now_s, double ran_s, uint64_t num_done, bool may_stand) {
                return self.look(now_s, {ran_s, num_done, may_stand});
            },
            "now_s"_a, "ran_s"_a, "num_done"_a, "may_stand"_a);
    nb::class_<Watchdog>(m, "Watchdog", "Finds a thread that stands still.")
        .def(nb::init<pid_t, clockid_t>(), "thread"_a, "clock"_a)
        .def("expect", &Watchdog::expect)
        .def("done", &Watchdog::done)
        .def(
            "start",
            [](Watchdog& self, double tick_s, double limit_s, int exit_code, int signum) {
                self.start(tick_s, {limit_s, exit_code, signum});
            },
            "tick_s"_a, "limit_s"_a, "exit_code"_a, "signum"_a)
        .def("stop", &Watchdog::stop)
        .def_prop_ro("still_s", &Watchdog::still_s);
}

}  // namespace pdserve
