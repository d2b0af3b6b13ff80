#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "text_index.h"

namespace nb = nanobind;

namespace pdserve {

void bind_drafts(nb::module_& m) {
    nb::class_<TextIndex>(
        m, "TextIndex", "Earlier places of a text that read as its end does, and how it went on.")
        .def(nb::init<>())
        .def(
            "append",
            [](TextIndex& index, const std::vector<int32_t>& tokens) {
                index.append(tokens.data(), tokens.size());
            },
            nb::arg("tokens"))
        .def(
            "propose",
            [](const TextIndex& index, int most) {
                Proposal found = index.propose(most);
                return std::pair(std::move(found.tokens), found.matched);
            },
            nb::arg("most"))
        .def("__len__", &TextIndex::size)
        .def_prop_ro("num_bytes", &TextIndex::num_bytes);
}

}  // namespace pdserve
