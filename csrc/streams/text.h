// Text of byte-level tokens: each stands for the same bytes wherever it is, and may be a part of a
// character. Needs the GIL: Python's own decoder says what is no UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

namespace pdserve {

// token id |-> its bytes, of the tokens that were told so far.
class PieceTable {
public:
    struct Piece {
        uint32_t begin = 0;
        uint32_t length = 0;
        bool is_known = false;
        bool is_special = false;
    };

    void add(size_t id, std::string_view bytes, bool is_special);
    // nullptr: nobody has told it.
    const Piece* find(int32_t id) const;
    std::string_view bytes(const Piece& piece) const {
        return std::string_view(bytes_).substr(piece.begin, piece.length);
    }

private:
    std::vector<Piece> pieces_;
    std::string bytes_;
};

// The text of one stream, in pieces that are whole characters.
class TextDecoder {
public:
    // `skips_special`: special tokens have no text; with `keeps_some`, that is for Python to say.
    TextDecoder(std::shared_ptr<PieceTable> pieces, bool skips_special, bool keeps_some)
        : pieces_(std::move(pieces)), skips_special_(skips_special), keeps_some_(keeps_some) {}

    // Appends the bytes of tokens. Returns false if that of one is not known.
    bool gather(const std::vector<int32_t>& ids, std::string& bytes) const;
    nanobind::str decode(std::string_view bytes);
    // The bytes of a character that is not complete, as U+FFFD.
    nanobind::str finish();
    bool is_inside_character() const { return !rest_.empty(); }

private:
    std::shared_ptr<PieceTable> pieces_;
    bool skips_special_, keeps_some_;
    std::string rest_;  // the first bytes of a character
};

}  // namespace pdserve
