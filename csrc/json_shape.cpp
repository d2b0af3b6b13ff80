// Counts the objects that parsing a JSON text would create. The text is not validated: for invalid
// JSON, the counts are at least those up to the first error.

#include "json_shape.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>

#include <nanobind/stl/tuple.h>

namespace nb = nanobind;

namespace pdserve {
namespace {

// Returns the position after the string that begins at `begin`: its end is the first quote with an
// even number of backslashes before it.
const char* skip_string(const char* begin, const char* end) {
    for (const char* at = begin; at < end; ++at) {
        at = static_cast<const char*>(std::memchr(at, '"', end - at));
        if (at == nullptr) break;
        const char* escape = at;
        while (escape > begin && escape[-1] == '\\') --escape;
        if ((at - escape) % 2 == 0) return at + 1;
    }
    return end;
}

// containers, members, commas, depth
using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t>;

Shape json_shape(nb::bytes text) {
    const char* at = text.c_str();
    const char* const end = at + text.size();
    int64_t containers = 0, members = 0, commas = 0, depth = 0, deepest = 0;
    nb::gil_scoped_release unlocked;
    while (at < end) {
        switch (*at++) {
            case '"':
                at = skip_string(at, end);
                break;
            case '[':
            case '{':
                ++containers;
                deepest = std::max(deepest, ++depth);
                break;
            case ']':
            case '}':
                --depth;
                break;
            case ':':
                ++members;
                break;
            case ',':
                ++commas;
                break;
        }
    }
    return {containers, members, commas, deepest};
}

}  // namespace

void bind_json_shape(nb::module_& m) {
    using namespace nb::literals;
    m.def("json_shape", &json_shape, "text"_a,
          "(containers, members, commas, depth) of a JSON text, strings left out.");
}

}  // namespace pdserve
