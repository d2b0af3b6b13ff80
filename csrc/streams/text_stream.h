// Events of a stream that hold nothing but new text: from a run of tokens to its client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <nanobind/nanobind.h>

#include "histogram.h"
#include "text.h"
#include "token_run.h"

namespace pdserve {

class TextStream {
public:
    // What is around the text of an event, as JSON, and around an event.
    struct Frame {
        std::string before, behind;
        bool is_chunk;  // in HTTP/1.1's chunked coding
    };
    // What is written as it is; all else has to be made in another way.
    struct Most {
        size_t tokens, unread_bytes;
    };
    // What was written so far.
    struct Written {
        size_t tokens = 0, chars = 0;
        double last_s;        // when the last token came
        double text_s = 0.0;  // and the last one with text; 0: none had
    };

    // `transport` is asyncio's; `last_s`: when the token before came.
    TextStream(std::shared_ptr<TextDecoder> decoder, std::shared_ptr<Histogram> gaps,
               nanobind::object transport, Frame frame, Most most, double last_s)
        : decoder_(std::move(decoder)), gaps_(std::move(gaps)), transport_(std::move(transport)),
          frame_(std::move(frame)), most_(most) {
        written_.last_s = last_s;
    }

    // Writes what is unread, in one event; false, and nothing is read: that needs more than this.
    bool write(TokenRun& run);
    const Written& written() const { return written_; }

private:
    bool has_space(size_t num_bytes) const;
    void measure(const TokenRun& run);
    void send(std::string_view text);

    std::shared_ptr<TextDecoder> decoder_;
    std::shared_ptr<Histogram> gaps_;
    nanobind::object transport_;
    Frame frame_;
    Most most_;
    Written written_;
};

}  // namespace pdserve
