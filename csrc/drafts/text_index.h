// Earlier places of texts that read as the end of a text does, and how they went on there.
//
// Places are chained by a hash of the tokens before them, newest first, as compressors of the LZ77
// kind find matches: a token costs two numbers and no search when it comes, and a look follows one
// chain for a bounded number of places. As there, what is too old is written over, where there is
// a limit. The suffix arrays of libraries (pydivsufsort was compared) are made of a whole text:
// tens of milliseconds for 100,000 tokens, and again with each new one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace pdserve {

struct Proposal {
    std::vector<int32_t> tokens;  // that may come next
    int matched = 0;              // tokens before them that read as the end of the text
};

class TextIndex {
  public:
    static constexpr int32_t kBreak = -1;  // between two texts: no proposal goes past it
    static constexpr size_t kLongest = 32;  // a longer match says no more

    // Of the last `most_tokens` at least are kept, and of twice as many at most.
    explicit TextIndex(size_t most_tokens = std::numeric_limits<size_t>::max());

    void append(int32_t token);

    // At most so many tokens behind a text that ends like this; none where nothing matches. Only
    // its last kLongest tokens count. It may be the end of the text itself, which has no breaks
    // then: if that repeats itself, it goes on with what is proposed.
    Proposal propose(const std::vector<int32_t>& end, int most) const;

    size_t size() const { return static_cast<size_t>(num_tokens_); }  // with those written over
    size_t num_bytes() const;

  private:
    int32_t at(uint32_t place) const { return tokens_[place & mask_]; }
    uint32_t first() const;  // the first place that is kept
    uint32_t bucket(const int32_t* gram) const;
    void add(uint32_t place);
    void rebuild(size_t capacity);
    int matched_before(uint32_t place, const std::vector<int32_t>& end) const;
    int32_t token(uint32_t place, const std::vector<int32_t>& further) const;

    size_t most_tokens_;
    uint64_t num_tokens_ = 0;          // since the beginning
    uint32_t end_ = 0;                 // the place behind the last token
    uint32_t mask_;                    // of a place in the arrays, whose size is a power of two
    std::vector<int32_t> tokens_;      // the token at a place
    std::vector<uint32_t> previous_;   // of a place: the one before in its chain; 0: none
    std::vector<uint32_t> newest_;     // of each chain
};

}  // namespace pdserve
