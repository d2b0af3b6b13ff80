#include "text_events.h"

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
double TextEvents::measure(const TokenRun& run, double last_s) {
    size_t begin = 0;
    for (const TokenRun::Arrival& arrival : run.arrivals()) {
        gaps_->observe(arrival.at_s - last_s);
        if (const size_t others = arrival.end - begin - 1) {
            gaps_->observe(0, static_cast<int64_t>(others));
        }
        begin = arrival.end;
        last_s = arrival.at_s;
    }
    return last_s;
}

nb::object TextEvents::next(TokenRun& run, size_t most, double last_s) {
    const size_t num_tokens = run.unread().size();
    gathered.clear();
    if (num_tokens > most || !decoder_->gather(run.unread(), gathered)) return nb::none();
    const nb::str text = decoder_->decode(gathered);
    last_s = measure(run, last_s);
    run.all_read();
    const Py_ssize_t num_chars = PyUnicode_GET_LENGTH(text.ptr());
    if (num_chars == 0) return nb::make_tuple(nb::none(), num_tokens, 0, last_s);
    Py_ssize_t size;
    const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (utf8 == nullptr) throw nb::python_error();
    made.assign(before_).push_back('"');
    append_escaped(made, {utf8, static_cast<size_t>(size)});
    made.append("\"").append(behind_);
    return nb::make_tuple(nb::bytes(made.data(), made.size()), num_tokens, num_chars, last_s);
}

}  // namespace pdserve
