// Where a step's layers find their tokens in a pool that has several blocks for the same ones:
// the first, which block tables name, and companions of it, with other layers
// (pdserve/kv/companions.py).
#pragma once

#include <cstdint>
#include <vector>

#include "../../attention/layer.h"
#include "../model.h"
#include "inputs.h"

namespace pdserve::decoder {

// The first key that any layer with a window sees of a request's rows, the oldest one included.
int32_t first_seen(const Model& model, int32_t context_len, int32_t num_rows);

// The steps of companions: as that of first blocks, with tables and slots of their own. What no
// window reaches is in no table: its entries are block 0, and not read.
class Companions {
public:
    // `first` with its slots; borrowed, as is `inputs`, until the step is over.
    void lay_out(const Model& model, const Inputs& inputs, const attention::Step& first);

    struct Place {
        const attention::Step* step;
        int index;  // of the layer in its block
    };

    // `index`: of the layer in the pool, where all are in one block.
    Place of(int64_t layer, int index) const;

private:
    void lay_out_one(const Model& model, int64_t number);

    const Inputs* inputs_ = nullptr;
    const attention::Step* first_ = nullptr;
    std::vector<attention::Step> steps_;
    std::vector<std::vector<int32_t>> tables_;
    std::vector<std::vector<int64_t>> slots_;
};

}  // namespace pdserve::decoder
