// Binds RankGroup into pdserve._native.
#pragma once

#include <vector>

#include <nanobind/nanobind.h>

#include "group.h"

namespace pdserve {

namespace ranks {

// A Group over an array that Python has mapped.
class OwnedGroup {
public:
    // Raises TypeError or ValueError: no writable bytes, too few, or no such rank.
    OwnedGroup(nanobind::object memory, int rank, const std::vector<int>& stages);

    Group& group() { return group_; }

private:
    nanobind::object memory_;
    Group group_;
};

}  // namespace ranks

void bind_ranks(nanobind::module_& m);

}  // namespace pdserve
