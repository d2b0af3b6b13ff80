// Reads of few blocks between pools of one layout, each in one native call.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Adds copy_blocks, send_blocks, receive_blocks and find_wrong_block; pdserve/_native.pyi documents
// them.
void bind_block_read(nanobind::module_& m);

}  // namespace pdserve
