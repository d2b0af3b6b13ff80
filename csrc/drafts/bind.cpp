#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "text_index.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

using Proposed = std::pair<std::vector<int32_t>, int>;

constexpr size_t kSlice = 2048;  // tokens that are added in one call: a fifth of a millisecond

// The prompt and the output of a request, as one.
class Text {
  public:
    explicit Text(nb::handle request)
        : prompt_(request.attr("prompt_token_ids")), output_(request.attr("output_token_ids")) {}

    size_t size() const { return prompt_.size() + output_.size(); }

    int32_t operator[](size_t place) const {
        const size_t num_prompt = prompt_.size();
        return nb::cast<int32_t>(
            place < num_prompt ? prompt_[place] : output_[place - num_prompt]);
    }

    std::vector<int32_t> end() const {
        std::vector<int32_t> tokens;
        const size_t size = this->size();
        for (size_t i = size - std::min(size, TextIndex::kLongest); i < size; ++i) {
            tokens.push_back((*this)[i]);
        }
        return tokens;
    }

  private:
    nb::list prompt_, output_;
};

Proposed propose(const TextIndex& index, const Text& text, int most) {
    Proposal found = index.propose(text.end(), most);
    return {std::move(found.tokens), found.matched};
}

class OwnText {
  public:
    Proposed propose(nb::handle request, int most) {
        const Text text(request);
        const size_t until = std::min(text.size(), index_.size() + kSlice);
        for (size_t i = index_.size(); i < until; ++i) index_.append(text[i]);
        if (until < text.size()) return {};
        return pdserve::propose(index_, text, most);
    }

    TextIndex index_;
};

class OtherTexts {
  public:
    explicit OtherTexts(size_t most_tokens) : index_(most_tokens) {}

    void add(const std::vector<int32_t>& text) {
        for (const int32_t token : text) index_.append(token);
        index_.append(TextIndex::kBreak);
    }

    Proposed propose(nb::handle request, int most) const {
        return pdserve::propose(index_, Text(request), most);
    }

    TextIndex index_;
};

}  // namespace

void bind_drafts(nb::module_& m) {
    nb::class_<OwnText>(
        m, "OwnText", "Earlier places of a text that read as its end does, and how it went on.")
        .def(nb::init<>())
        .def("propose", &OwnText::propose, nb::arg("request"), nb::arg("most"))
        .def("__len__", [](const OwnText& own) { return own.index_.size(); })
        .def_prop_ro("num_bytes", [](const OwnText& own) { return own.index_.num_bytes(); });
    nb::class_<OtherTexts>(
        m, "OtherTexts", "Places of other texts that read as the end of one does.")
        .def(nb::init<size_t>(), nb::arg("most_tokens"))
        .def("add", &OtherTexts::add, nb::arg("text"))
        .def("propose", &OtherTexts::propose, nb::arg("request"), nb::arg("most"))
        .def_prop_ro("num_bytes", [](const OtherTexts& o) { return o.index_.num_bytes(); });
}

}  // namespace pdserve
