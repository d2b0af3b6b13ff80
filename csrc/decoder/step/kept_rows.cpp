#include "kept_rows.h"

#include <algorithm>
#include <iterator>

namespace pdserve::decoder {

using attention::RowChoice;

namespace {

// The indices of the chosen rows in `rows`, which contains all of them. Both are ascending.
std::vector<int64_t> places_in(const std::vector<int64_t>& rows, const RowChoice& chosen) {
    std::vector<int64_t> places;
    places.reserve(chosen.num_rows);
    int64_t place = 0;
    for (int64_t i = 0; i < chosen.num_rows; ++i) {
        while (rows[place] != chosen.rows[i]) ++place;
        places.push_back(place);
    }
    return places;
}

}  // namespace

KeptRows::KeptRows(RowChoice sampled, RowChoice states) : all_(sampled) {
    if (states.num_rows == 0) return;
    merged_.reserve(sampled.num_rows + states.num_rows);
    std::set_union(sampled.rows, sampled.rows + sampled.num_rows, states.rows,
        states.rows + states.num_rows, std::back_inserter(merged_));
    sampled_ = places_in(merged_, sampled);
    states_ = places_in(merged_, states);
    all_ = {merged_.data(), static_cast<int64_t>(merged_.size())};
}

RowChoice KeptRows::sampled() const {
    return {sampled_.data(), static_cast<int64_t>(sampled_.size())};
}

}  // namespace pdserve::decoder
