// Earlier places of a text that read as its end does, and how it went on there.
//
// Places are chained by a hash of the tokens before them, newest first, as compressors of the LZ77
// kind find matches: a token costs two numbers and no search when it comes, and a look follows one
// chain for a bounded number of places. The suffix arrays of libraries (pydivsufsort was compared)
// are made of a whole text: tens of milliseconds for 100,000 tokens, and again with each new one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pdserve {

struct Proposal {
    std::vector<int32_t> tokens;  // that may come next
    int matched = 0;              // tokens before them that read as the end of the text
};

class TextIndex {
  public:
    TextIndex();

    void append(int32_t token);

    // At most so many tokens; none where nothing matches.
    Proposal propose(int most) const;

    size_t size() const { return tokens_.size(); }
    size_t num_bytes() const;

  private:
    uint32_t bucket(size_t place) const;
    void add(size_t place);
    void grow();
    int matched_before(size_t place) const;
    int32_t token(size_t place, const std::vector<int32_t>& further) const;

    std::vector<int32_t> tokens_;
    std::vector<uint32_t> previous_;  // [size + 1]: the place before in its chain; 0: none
    std::vector<uint32_t> newest_;    // of each chain; a power of two
};

}  // namespace pdserve
