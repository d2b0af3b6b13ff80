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
            "propose",
            [](TextIndex& index, nb::handle request, int most) {
                const nb::list prompt(request.attr("prompt_token_ids"));
                const nb::list output(request.attr("output_token_ids"));
                const size_t num_prompt = prompt.size(), end = num_prompt + output.size();
                for (size_t i = index.size(); i < end; ++i) {
                    index.append(nb::cast<int32_t>(
                        i < num_prompt ? prompt[i] : output[i - num_prompt]));
                }
                Proposal found = index.propose(most);
                return std::pair(std::move(found.tokens), found.matched);
            },
            nb::arg("request"), nb::arg("most"))
        .def("__len__", &TextIndex::size)
        .def_prop_ro("num_bytes", &TextIndex::num_bytes);
}

}  // namespace pdserve
