// Events of a stream that hold nothing but new text: from a run of tokens to the bytes of an event.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <nanobind/nanobind.h>

#include "histogram.h"
#include "text.h"
#include "token_run.h"

namespace pdserve {

class TextEvents {
public:
    // `before`, `behind`: what is around the text, as JSON, in an event.
    TextEvents(std::shared_ptr<TextDecoder> decoder, std::shared_ptr<Histogram> gaps,
               std::string_view before, std::string_view behind)
        : decoder_(std::move(decoder)), gaps_(std::move(gaps)), before_(before), behind_(behind) {}

    // (event, tokens, characters, when the last came), or None: they need more than this.
    nanobind::object next(TokenRun& run, size_t most, double last_s);

private:
    double measure(const TokenRun& run, double last_s);

    std::shared_ptr<TextDecoder> decoder_;
    std::shared_ptr<Histogram> gaps_;
    std::string before_, behind_;
};

}  // namespace pdserve
