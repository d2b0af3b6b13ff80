// Checks of what callers pass, before any byte is touched.
#pragma once

#include <string>

#include "../tensor_view.h"
#include "copy_ways.h"

namespace pdserve {

inline void check_span(const char* region, size_t region_bytes, size_t row, int64_t offset, int64_t nbytes) {
    const auto size = static_cast<int64_t>(region_bytes);
    if (offset >= 0 && nbytes >= 0 && offset <= size && nbytes <= size - offset) return;
    raise_value_error("span " + std::to_string(row) + " of the " + region,
                      "a range within " + std::to_string(size) + " bytes",
                      std::to_string(nbytes) + " bytes at offset " + std::to_string(offset));
}

// The way of this name; null for none, which leaves the choice to what was measured.
inline const CopyWay* find_way(const std::string& name) {
    if (name.empty()) return nullptr;
    for (const CopyWay& way : kCopyWays)
        if (name == way.name) return &way;
    raise_value_error("way", "one of copy_rates()", name);
}

}  // namespace pdserve
