#include "text_index.h"

#include <algorithm>

namespace pdserve {

namespace {

constexpr size_t kGram = 3;       // tokens before a place that are hashed
constexpr int kMostPlaces = 32;   // of a chain that are looked at
constexpr int kLongest = 32;      // a longer match says no more
constexpr size_t kFirstSize = 256;

}  // namespace

TextIndex::TextIndex() : previous_(1), newest_(kFirstSize) {}

uint32_t TextIndex::bucket(size_t place) const {
    uint64_t hash = 0;
    for (size_t i = place - kGram; i < place; ++i) {
        hash = (hash ^ static_cast<uint32_t>(tokens_[i])) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return static_cast<uint32_t>(hash) & static_cast<uint32_t>(newest_.size() - 1);
}

void TextIndex::add(size_t place) {
    if (place < kGram) return;
    uint32_t& newest = newest_[bucket(place)];
    previous_[place] = newest;
    newest = static_cast<uint32_t>(place);
}

void TextIndex::grow() {
    newest_.assign(2 * newest_.size(), 0);
    for (size_t place = kGram; place <= tokens_.size(); ++place) add(place);
}

void TextIndex::append(int32_t token) {
    tokens_.push_back(token);
    previous_.push_back(0);
    add(tokens_.size());
    if (tokens_.size() > newest_.size()) grow();
}

int TextIndex::matched_before(size_t place) const {
    const size_t end = tokens_.size(), most = std::min<size_t>(place, kLongest);
    size_t matched = 0;
    while (matched < most && tokens_[place - 1 - matched] == tokens_[end - 1 - matched]) ++matched;
    return static_cast<int>(matched);
}

// A match may overlap the end: a text that repeats itself goes on with what is proposed.
int32_t TextIndex::token(size_t place, const std::vector<int32_t>& further) const {
    return place < tokens_.size() ? tokens_[place] : further[place - tokens_.size()];
}

Proposal TextIndex::propose(int most) const {
    Proposal proposal;
    const size_t end = tokens_.size();
    if (end < kGram || most <= 0) return proposal;
    std::vector<size_t> places;  // of the longest match, newest first
    size_t place = previous_[end];
    for (int looked = 0; place != 0 && looked < kMostPlaces; ++looked, place = previous_[place]) {
        const int matched = matched_before(place);
        if (matched < static_cast<int>(kGram) || matched < proposal.matched) continue;
        if (matched > proposal.matched) places.clear();
        proposal.matched = matched;
        places.push_back(place);
    }
    while (!places.empty() && static_cast<int>(proposal.tokens.size()) < most) {
        const size_t ahead = proposal.tokens.size();
        int32_t best = 0;
        size_t most_votes = 0;
        for (const size_t one : places) {
            const int32_t candidate = token(one + ahead, proposal.tokens);
            const size_t votes = std::count_if(places.begin(), places.end(), [&](size_t other) {
                return token(other + ahead, proposal.tokens) == candidate;
            });
            if (votes > most_votes) most_votes = votes, best = candidate;
            if (2 * most_votes >= places.size()) break;  // usually they all agree
        }
        const auto differs = [&](size_t one) {
            return token(one + ahead, proposal.tokens) != best;
        };
        places.erase(std::remove_if(places.begin(), places.end(), differs), places.end());
        proposal.tokens.push_back(best);
    }
    return proposal;
}

size_t TextIndex::num_bytes() const {
    return 4 * (tokens_.capacity() + previous_.capacity() + newest_.capacity());
}

}  // namespace pdserve
