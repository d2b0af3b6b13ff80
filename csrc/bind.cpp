#include "bind.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "core_split.h"
#include "tensor_view.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

constexpr int kMaxThreads = 1024;

// Shared with the pool, which must not own anything of Python's.
class OwnedSplit {
public:
    OwnedSplit(int fd, bool takes_rest, int num_cores, double lease_s) {
        if (num_cores < 2 || num_cores > kMaxThreads) {
            raise_value_error(
                "num_cores", "2 to " + std::to_string(kMaxThreads), std::to_string(num_cores));
        }
        if (!(lease_s > 0.0 && lease_s < 1e6)) {
            raise_value_error("lease_s", "a time above 0", std::to_string(lease_s));
        }
        const std::chrono::microseconds lease(static_cast<int64_t>(std::ceil(lease_s * 1e6)));
        try {
            split_ = std::make_shared<CoreSplit>(fd, takes_rest, num_cores, lease);
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        most_ = num_cores - 1;
    }

    void ask(int num_cores) {
        if (num_cores < 1 || num_cores > most_) {
            raise_value_error(
                "num_cores", "1 to " + std::to_string(most_), std::to_string(num_cores));
        }
        split_->ask(num_cores);
    }

    const std::shared_ptr<CoreSplit>& split() const { return split_; }

private:
    std::shared_ptr<CoreSplit> split_;
    int most_;
};

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

void bind_core_split(nb::module_& m) {
    nb::class_<OwnedSplit>(m, "CoreSplit", "Cores that two processes of a host share.")
        .def(nb::init<int, bool, int, double>(), nb::arg("fd"), nb::arg("takes_rest"),
            nb::arg("num_cores"), nb::arg("lease_s"))
        .def("ask", &OwnedSplit::ask, nb::arg("num_cores"), "A step begins.")
        .def("release", [](OwnedSplit& self) { self.split()->release(); }, "Nothing is computed.")
        .def(
            "clear_other", [](OwnedSplit& self) { self.split()->clear_other(); },
            "The other process has ended.")
        .def_prop_ro("asked_by_other", [](OwnedSplit& self) { return self.split()->asked_by_other(); })
        .def_prop_ro("allowed", [](OwnedSplit& self) { return self.split()->allowed(); })
        .def_prop_ro("mean_cores", [](OwnedSplit& self) { return self.split()->mean_cores(); });
    m.attr("CORE_SPLIT_BYTES") = CoreSplit::kBytes;
    m.def(
        "set_core_split",
        [](OwnedSplit* split) {
            std::shared_ptr<CoreSplit> shared = split == nullptr ? nullptr : split->split();
            nb::gil_scoped_release release;
            ThreadPool::instance().set_core_split(std::move(shared));
        },
        nb::arg("split").none(), "Share the cores of kernel calls with another process, or not.");
}

}  // namespace pdserve
