#include "text_index.h"

#include <algorithm>

namespace pdserve {

namespace {

constexpr size_t kGram = 3;      // tokens before a place that are hashed
constexpr int kMostPlaces = 32;  // of a chain that are looked at
constexpr size_t kFirstSize = 256;
constexpr uint32_t kLastPlace = 1u << 31;  // then places are counted from the beginning again

}  // namespace

TextIndex::TextIndex(size_t most_tokens)
    : most_tokens_(most_tokens),
      mask_(kFirstSize - 1),
      tokens_(kFirstSize),
      previous_(kFirstSize),
      newest_(kFirstSize) {}

uint32_t TextIndex::first() const {
    const size_t size = tokens_.size();
    return end_ > size ? end_ - static_cast<uint32_t>(size) : 0;
}

uint32_t TextIndex::bucket(const int32_t* gram) const {
    uint64_t hash = 0;
    for (size_t i = 0; i < kGram; ++i) {
        hash = (hash ^ static_cast<uint32_t>(gram[i])) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return static_cast<uint32_t>(hash) & mask_;
}

void TextIndex::add(uint32_t place) {
    if (place < first() + kGram) return;
    int32_t gram[kGram];
    for (size_t i = 0; i < kGram; ++i) gram[i] = at(place - kGram + i);
    uint32_t& newest = newest_[bucket(gram)];
    previous_[place & mask_] = newest;
    newest = place;
}

// Counts places from the first one that is kept.
void TextIndex::rebuild(size_t capacity) {
    std::vector<int32_t> kept;
    kept.reserve(std::min(capacity, tokens_.size()));
    for (uint32_t place = first(); place < end_; ++place) kept.push_back(at(place));
    if (kept.size() == capacity) kept.erase(kept.begin(), kept.begin() + capacity / 2);
    mask_ = static_cast<uint32_t>(capacity - 1);
    tokens_.assign(capacity, 0);
    previous_.assign(capacity, 0);
    newest_.assign(capacity, 0);
    end_ = 0;
    for (const int32_t token : kept) {
        tokens_[end_ & mask_] = token;
        add(++end_);
    }
}

void TextIndex::append(int32_t token) {
    if (end_ == tokens_.size() && end_ < most_tokens_) rebuild(2 * tokens_.size());
    if (end_ == kLastPlace) rebuild(tokens_.size());
    tokens_[end_ & mask_] = token;
    ++num_tokens_;
    add(++end_);
}

int TextIndex::matched_before(uint32_t place, const std::vector<int32_t>& end) const {
    const size_t most = std::min({size_t{place - first()}, kLongest, end.size()});
    size_t matched = 0;
    while (matched < most &&
           at(place - 1 - static_cast<uint32_t>(matched)) == end[end.size() - 1 - matched]) {
        ++matched;
    }
    return static_cast<int>(matched);
}

// A match may overlap the end: a text that repeats itself goes on with what is proposed.
int32_t TextIndex::token(uint32_t place, const std::vector<int32_t>& further) const {
    return place < end_ ? at(place) : further[place - end_];
}

Proposal TextIndex::propose(const std::vector<int32_t>& end, int most) const {
    Proposal proposal;
    if (end.size() < kGram || most <= 0) return proposal;
    std::vector<uint32_t> places;  // of the longest match, newest first
    uint32_t place = newest_[bucket(&end[end.size() - kGram])];
    if (place == end_) place = previous_[place & mask_];
    const uint32_t first_place = first();
    for (int looked = 0; place > first_place && looked < kMostPlaces; ++looked) {
        const int matched = matched_before(place, end);
        if (matched >= static_cast<int>(kGram) && matched >= proposal.matched) {
            if (matched > proposal.matched) places.clear();
            proposal.matched = matched;
            places.push_back(place);
        }
        place = previous_[place & mask_];
    }
    while (!places.empty() && static_cast<int>(proposal.tokens.size()) < most) {
        const uint32_t ahead = static_cast<uint32_t>(proposal.tokens.size());
        int32_t best = kBreak;
        size_t most_votes = 0;
        for (const uint32_t one : places) {
            const int32_t candidate = token(one + ahead, proposal.tokens);
            const size_t votes = std::count_if(places.begin(), places.end(), [&](uint32_t other) {
                return token(other + ahead, proposal.tokens) == candidate;
            });
            if (votes > most_votes) most_votes = votes, best = candidate;
            if (2 * most_votes >= places.size()) break;  // usually they all agree
        }
        if (best == kBreak) break;
        const auto differs = [&](uint32_t one) {
            return token(one + ahead, proposal.tokens) != best;
        };
        places.erase(std::remove_if(places.begin(), places.end(), differs), places.end());
        proposal.tokens.push_back(best);
    }
    if (proposal.tokens.empty()) proposal.matched = 0;
    return proposal;
}

size_t TextIndex::num_bytes() const {
    return 4 * (tokens_.capacity() + previous_.capacity() + newest_.capacity());
}

}  // namespace pdserve
