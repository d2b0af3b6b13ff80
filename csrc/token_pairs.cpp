// For each token it looks up both parts at every place where a character begins.

#include "token_pairs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "tensor_view.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

struct Pair {
    double score;  // of both together
    int32_t first;
    int32_t second;

    bool operator<(const Pair& other) const {
        return std::tie(other.score, first, second) < std::tie(score, other.first, other.second);
    }
};

std::vector<Pair> find_pairs(
    const std::vector<std::string>& texts, const std::vector<double>& scores) {
    std::unordered_map<std::string_view, int32_t> ids;
    ids.reserve(2 * texts.size());
    for (size_t id = 0; id < texts.size(); ++id) ids.emplace(texts[id], static_cast<int32_t>(id));
    std::vector<Pair> pairs;
    for (size_t id = 0; id < texts.size(); ++id) {
        if (std::isinf(scores[id])) continue;
        const std::string_view text = texts[id];
        for (size_t end = 1; end < text.size(); ++end) {
            if (!begins_character(text[end])) continue;
            const auto first = ids.find(text.substr(0, end));
            if (first == ids.end()) continue;
            const auto second = ids.find(text.substr(end));
            if (second == ids.end()) continue;
            pairs.push_back({scores[id], first->second, second->second});
        }
    }
    std::sort(pairs.begin(), pairs.end());
    return pairs;
}

nb::bytes token_pairs(const std::vector<std::string>& texts, const std::vector<double>& scores) {
    if (scores.size() != texts.size()) {
        raise_value_error("scores", std::to_string(texts.size()), std::to_string(scores.size()));
    }
    std::vector<int32_t> ids;
    {
        nb::gil_scoped_release unlocked;
        for (const Pair& pair : find_pairs(texts, scores)) {
            ids.insert(ids.end(), {pair.first, pair.second});
        }
    }
    return nb::bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t));
}

}  // namespace

void bind_token_pairs(nb::module_& m) {
    using namespace nb::literals;
    m.def("token_pairs", &token_pairs, "texts"_a, "scores"_a,
          "int32 [number of pairs, 2]: ids of tokens that are one together, the best first.");
}

}  // namespace pdserve
