#include "text_stream.h"

#include <cstdio>
#include <string_view>

namespace nb = nanobind;

namespace pdserve {
namespace {

// Bytes and events that are being made, one at a time: under the GIL.
std::string gathered, made;

void append_escaped(std::string& out, std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    size_t from = 0;
    for (size_t at = 0; at < text.size(); ++at) {
        const auto byte = static_cast<unsigned char>(text[at]);
        if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
        out.append(text, from, at - from);
        from = at + 1;
        switch (byte) {
            case '"': out += "\\\""; break;
            case '\\': out += "\\\\"; break;
            case '\b': out += "\\b"; break;
            case '\f': out += "\\f"; break;
            case '\n': out += "\\n"; break;
            case '\r': out += "\\r"; break;
            case '\t': out += "\\t"; break;
            default:
                out += "\\u00";
                out += kHex[byte >> 4];
                out += kHex[byte & 15];
        }
    }
    out.append(text, from);
}

}  // namespace

// Tokens that arrived together have no gap but the first one's.
void TextStream::measure(const TokenRun& run) {
    size_t begin = 0;
    for (const TokenRun::Arrival& arrival : run.arrivals()) {
        gaps_->observe(arrival.at_s - written_.last_s);
        if (const size_t others = arrival.end - begin - 1) {
            gaps_->observe(0, static_cast<int64_t>(others));
        }
        begin = arrival.end;
        written_.last_s = arrival.at_s;
    }
    written_.tokens += run.unread().size();
}

bool TextStream::has_space(size_t num_bytes) const {
    if (nb::cast<bool>(transport_.attr("is_closing")())) return false;
    const auto unread = nb::cast<size_t>(transport_.attr("get_write_buffer_size")());
    return unread + num_bytes < most_.unread_bytes;
}

void TextStream::send(std::string_view text) {
    made.assign(frame_.before).push_back('"');
    append_escaped(made, text);
    made.append("\"").append(frame_.behind);
    if (frame_.is_chunk) {
        char size[24];
        const int num_digits = std::snprintf(size, sizeof size, "%zx\r\n", made.size());
        made.insert(0, size, static_cast<size_t>(num_digits)).append("\r\n");
    }
    transport_.attr("write")(nb::bytes(made.data(), made.size()));
    written_.text_s = written_.last_s;
}

bool TextStream::write(TokenRun& run) {
    gathered.clear();
    if (run.unread().size() > most_.tokens || !decoder_->gather(run.unread(), gathered)) {
        return false;
    }
    if (!has_space(frame_.before.size() + gathered.size() + frame_.behind.size())) return false;
    const nb::str text = decoder_->decode(gathered);
    measure(run);
    run.all_read();
    const Py_ssize_t num_chars = PyUnicode_GET_LENGTH(text.ptr());
    if (num_chars == 0) return true;
    written_.chars += static_cast<size_t>(num_chars);
    Py_ssize_t size;
    const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (utf8 == nullptr) throw nb::python_error();
    send({utf8, static_cast<size_t>(size)});
    return true;
}

}  // namespace pdserve
