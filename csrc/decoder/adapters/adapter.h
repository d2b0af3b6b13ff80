// An adapter as the forward pass sees it: what it adds to the products of a model's matrices.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../../linear/linear.h"

namespace pdserve::decoder {

// All that an adapter adds to the product of one matrix. Scales are in B already.
struct Addition {
    linear::PackedMatrix a;  // [ranks of all of its parts, num_in]
    linear::Expansion b;
};

// Rows of the vocabulary that an adapter has instead of the model's.
struct TrainedTokens {
    std::unordered_map<int64_t, int64_t> rows;  // token id |-> row of `embedding`
    const void* embedding;                      // [rows, hidden], of the activations' type
    std::vector<int64_t> head_ids;              // of the rows of `head`; those of a rank
    linear::PackedMatrix head;                  // [head_ids, hidden]
};

struct Adapter {
    std::unordered_map<const linear::PackedMatrix*, Addition> additions;  // by the model's matrix
    // Of the vocabulary, all of the activations' type; null or without weights: there is none.
    const void* embedding;          // [vocab, hidden], instead of the model's
    linear::PackedMatrix lm_head;   // likewise
    const void* embedding_a;        // [vocab, ranks]: a row of it, times B, is added to a token's
    linear::PackedMatrix embedding_b;  // [hidden, ranks]
    TrainedTokens trained;

    const Addition* find(const linear::PackedMatrix& matrix) const {
        const auto found = additions.find(&matrix);
        return found == additions.end() ? nullptr : &found->second;
    }
};

}  // namespace pdserve::decoder
