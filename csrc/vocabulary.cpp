// Hashes of all parts of a token cost one pass over it: they are of polynomials, so that of an end
// follows from that of the begin before it.

#include "vocabulary.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/stl/vector.h>

#include "tensor_view.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

// ---- reading -------------------------------------------------------------------------------------

nb::tuple sized_texts(nb::handle data, size_t position, size_t count) {
    const TensorView bytes(data, "data");
    bytes.expect_type({ElementType::kUInt8});
    bytes.expect_shape({-1}, "number of bytes");
    bytes.expect_contiguous();
    const char* begin = bytes.data<const char>();
    const auto end = static_cast<size_t>(bytes.size(0));
    nb::list texts;
    for (; count > 0 && position <= end && end - position >= sizeof(uint64_t); --count) {
        uint64_t length;
        std::memcpy(&length, begin + position, sizeof length);
        const size_t start = position + sizeof length;
        if (length > end - start) break;
        PyObject* text = PyUnicode_DecodeUTF8(
            begin + start, static_cast<Py_ssize_t>(length), "strict");
        if (text == nullptr) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw nb::python_error();
            PyErr_Clear();
            break;
        }
        texts.append(nb::steal(text));
        position = start + length;
    }
    return nb::make_tuple(texts, position);
}

// ---- pairs ---------------------------------------------------------------------------------------

constexpr uint64_t kBase = 0x9E3779B97F4A7C15;

uint64_t with_byte(uint64_t hash, char byte) {
    return hash * kBase + static_cast<unsigned char>(byte) + 1;
}

uint64_t hash_of(std::string_view text) {
    uint64_t hash = 0;
    for (const char byte : text) hash = with_byte(hash, byte);
    return hash;
}

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

class Ids {
public:
    explicit Ids(const std::vector<std::string_view>& texts) {
        while (size_t{1} << bits_ < 2 * texts.size()) ++bits_;
        slots_.resize(size_t{1} << bits_);
        for (size_t id = 0; id < texts.size(); ++id) {
            const uint64_t hash = hash_of(texts[id]);
            size_t at = place(hash);
            while (slots_[at].id >= 0) at = next(at);
            slots_[at] = {hash, static_cast<int32_t>(id)};
        }
    }

    void fetch(uint64_t hash) const { __builtin_prefetch(&slots_[place(hash)]); }

    // The first token with this hash that `is` one; -1: there is none.
    template <class Is>
    int32_t find(uint64_t hash, const Is& is) const {
        for (size_t at = place(hash); slots_[at].id >= 0; at = next(at)) {
            if (slots_[at].hash == hash && is(slots_[at].id)) return slots_[at].id;
        }
        return -1;
    }

private:
    struct Slot {
        uint64_t hash = 0;
        int32_t id = -1;
    };

    size_t place(uint64_t hash) const { return (hash ^ hash >> 32) * kBase >> (64 - bits_); }
    size_t next(size_t at) const { return (at + 1) & (slots_.size() - 1); }

    std::vector<Slot> slots_;
    int bits_ = 1;
};

using Pair = std::pair<int32_t, int32_t>;

// One place where a token may be divided, and the hashes of both parts.
struct Split {
    size_t end;
    uint64_t first;
    uint64_t second;
};

// All places in a text where a character begins. `powers`: of the base, by exponent.
void find_splits(
    std::string_view text, const std::vector<uint64_t>& powers, std::vector<Split>& splits) {
    const uint64_t whole = hash_of(text);
    uint64_t first = 0;
    splits.clear();
    for (size_t end = 1; end < text.size(); ++end) {
        first = with_byte(first, text[end - 1]);
        if (!begins_character(text[end])) continue;
        splits.push_back({end, first, whole - first * powers[text.size() - end]});
    }
}

// Most time goes to memory, so what is looked up is fetched before; texts are compared last.
void add_pairs_of(
    size_t whole, const std::vector<std::string_view>& texts, const Ids& ids,
    const std::vector<Split>& splits, std::vector<Pair>& pairs) {
    const std::string_view text = texts[whole];
    const auto any = [](int32_t) { return true; };
    for (const Split& split : splits) {
        if (ids.find(split.first, any) < 0 || ids.find(split.second, any) < 0) continue;
        const int32_t first = ids.find(
            split.first, [&](int32_t id) { return texts[id] == text.substr(0, split.end); });
        const int32_t second = ids.find(
            split.second, [&](int32_t id) { return texts[id] == text.substr(split.end); });
        if (first >= 0 && second >= 0) pairs.emplace_back(first, second);
    }
}

std::vector<uint64_t> powers_for(const std::vector<std::string_view>& texts) {
    size_t longest = 0;
    for (const std::string_view text : texts) longest = std::max(longest, text.size());
    std::vector<uint64_t> powers{1};
    while (powers.size() <= longest) powers.push_back(powers.back() * kBase);
    return powers;
}

std::vector<Pair> find_pairs(
    const std::vector<std::string_view>& texts, const std::vector<double>& scores) {
    std::vector<int32_t> merged;
    for (size_t id = 0; id < texts.size(); ++id) {
        if (std::isfinite(scores[id])) merged.push_back(static_cast<int32_t>(id));
    }
    std::stable_sort(merged.begin(), merged.end(), [&](int32_t one, int32_t other) {
        return scores[one] > scores[other];
    });
    const Ids ids(texts);
    const std::vector<uint64_t> powers = powers_for(texts);
    std::vector<Split> splits, next;
    std::vector<Pair> pairs;
    const auto fetch = [&](size_t place) {
        next.clear();
        if (place >= merged.size()) return;
        find_splits(texts[merged[place]], powers, next);
        for (const Split& split : next) {
            ids.fetch(split.first);
            ids.fetch(split.second);
        }
    };
    fetch(0);
    size_t equals = 0;  // where those begin that have the score of the newest
    for (size_t place = 0; place < merged.size(); ++place) {
        const bool is_next = place > 0 && scores[merged[place - 1]] != scores[merged[place]];
        if (is_next) {
            std::sort(pairs.begin() + static_cast<std::ptrdiff_t>(equals), pairs.end());
            equals = pairs.size();
        }
        std::swap(splits, next);
        fetch(place + 1);
        add_pairs_of(static_cast<size_t>(merged[place]), texts, ids, splits, pairs);
    }
    std::sort(pairs.begin() + static_cast<std::ptrdiff_t>(equals), pairs.end());
    return pairs;
}

nb::list token_pairs(const nb::list& texts, const std::vector<double>& scores) {
    if (scores.size() != texts.size()) {
        raise_value_error("scores", std::to_string(texts.size()), std::to_string(scores.size()));
    }
    std::vector<std::string_view> views;
    views.reserve(texts.size());
    for (const nb::handle text : texts) {
        Py_ssize_t length;
        const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
        if (bytes == nullptr) throw nb::python_error();
        views.emplace_back(bytes, static_cast<size_t>(length));
    }
    std::vector<Pair> pairs;
    {
        nb::gil_scoped_release unlocked;  // nobody else has the list
        pairs = find_pairs(views, scores);
    }
    nb::list found;
    for (const auto& [first, second] : pairs) {
        found.append(nb::make_tuple(texts[first], texts[second]));
    }
    return found;
}

}  // namespace

void bind_vocabulary(nb::module_& m) {
    using namespace nb::literals;
    m.def("sized_texts", &sized_texts, "data"_a, "position"_a, "count"_a,
          "Read texts whose sizes are before them: (those until the first bad one, its place).");
    m.def("token_pairs", &token_pairs, "texts"_a, "scores"_a,
          "Pairs of tokens that are one together, the best first.");
}

}  // namespace pdserve
