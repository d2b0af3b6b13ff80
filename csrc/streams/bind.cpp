#include "bind.h"

#include <string_view>
#include <utility>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "histogram.h"
#include "text.h"
#include "text_stream.h"
#include "token_run.h"

namespace nb = nanobind;

namespace pdserve {
namespace {

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// The run of a request: its attribute `output`. Borrowed from the request.
TokenRun& run_of(nb::handle request) {
    static PyObject* const name = PyUnicode_InternFromString("output");
    const nb::object output = nb::steal(PyObject_GetAttr(request.ptr(), name));
    if (!output.is_valid()) throw nb::python_error();
    return nb::cast<TokenRun&>(output);
}

long integer(nb::handle value) {
    const long read = PyLong_AsLong(value.ptr());
    if (read == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return read;
}

nb::tuple add_tokens(nb::dict running, nb::list ids, nb::list indices, nb::list token_ids,
                     double now_s) {
    if (ids.size() != indices.size() || ids.size() != token_ids.size()) {
        throw nb::value_error("the columns differ in length");
    }
    nb::list begun, left;
    size_t num_added = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
        PyObject* request = PyDict_GetItemWithError(running.ptr(), nb::handle(ids[i]).ptr());
        if (request == nullptr) {
            if (PyErr_Occurred() != nullptr) throw nb::python_error();
            continue;
        }
        TokenRun& run = run_of(request);
        const long index = integer(indices[i]);
        if (index < 0 || !run.takes(static_cast<size_t>(index), now_s)) {
            left.append(i);
            continue;
        }
        ++num_added;
        if (run.add(static_cast<int32_t>(integer(token_ids[i])), now_s)) {
            begun.append(nb::handle(request));
        }
    }
    return nb::make_tuple(begun, left, num_added);
}

nb::list read(TokenRun& run) {
    nb::list arrivals;
    size_t begin = 0;
    for (const TokenRun::Arrival& arrival : run.arrivals()) {
        nb::list ids;
        for (size_t i = begin; i < arrival.end; ++i) ids.append(run.unread()[i]);
        arrivals.append(nb::make_tuple(run.first_unread() + begin, ids, arrival.at_s));
        begin = arrival.end;
    }
    run.all_read();
    return arrivals;
}

void bind_text(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<PieceTable>(m, "PieceTable", "Bytes of tokens, by id.")
        .def(nb::init<>())
        .def("add", [](PieceTable& table, uint32_t id, const nb::bytes& piece, bool is_special) {
            table.add(id, view(piece), is_special);
        }, "token_id"_a, "piece"_a, "is_special"_a);
    nb::class_<TextDecoder>(m, "TextDecoder", "Text of a stream of bytes, by whole characters.")
        .def(nb::init<std::shared_ptr<PieceTable>, bool, bool>(),
             "pieces"_a, "skips_special"_a, "keeps_some"_a)
        .def("decode", [](TextDecoder& decoder, const nb::bytes& piece) {
            return decoder.decode(view(piece));
        }, "piece"_a)
        .def("finish", &TextDecoder::finish)
        .def_prop_ro("is_inside_character", &TextDecoder::is_inside_character);
    nb::class_<TextStream::Written>(m, "WrittenText", "What a TextStream has written.")
        .def_ro("tokens", &TextStream::Written::tokens)
        .def_ro("chars", &TextStream::Written::chars)
        .def_ro("last_s", &TextStream::Written::last_s)
        .def_ro("text_s", &TextStream::Written::text_s);
    nb::class_<TextStream>(m, "TextStream", "Writes the text of a run of tokens as events.")
        .def("__init__", [](TextStream* self, std::shared_ptr<TextDecoder> decoder,
                            std::shared_ptr<Histogram> gaps, nb::object transport,
                            const nb::bytes& before, const nb::bytes& behind, bool is_chunk,
                            size_t most_tokens, size_t most_unread_bytes, double last_s) {
            TextStream::Frame frame{std::string(view(before)), std::string(view(behind)), is_chunk};
            new (self) TextStream(std::move(decoder), std::move(gaps), std::move(transport),
                                  std::move(frame), {most_tokens, most_unread_bytes}, last_s);
        }, "decoder"_a, "gaps"_a, "transport"_a, "before"_a, "behind"_a, "is_chunk"_a,
           "most_tokens"_a, "most_unread_bytes"_a, "last_s"_a)
        .def("write", &TextStream::write, "run"_a)
        .def_prop_ro("written", &TextStream::written);
}

}  // namespace

void bind_streams(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<TokenRun>(m, "TokenRun", "A request's output, as it arrives.")
        .def(nb::init<>())
        .def("__len__", &TokenRun::size)
        .def_prop_ro("token_ids", &TokenRun::ids)
        .def_prop_ro("is_open", &TokenRun::is_open)
        .def("extend", &TokenRun::extend, "token_ids"_a)
        .def("open", &TokenRun::open, "until_s"_a)
        .def("close", &TokenRun::close)
        .def("read", &read);
    nb::class_<Histogram>(m, "Histogram", "Counts of values by bucket.")
        .def(nb::init<std::vector<double>>(), "bounds"_a)
        .def("observe", [](Histogram& histogram, double value) { histogram.observe(value); },
             "value"_a)
        .def_prop_ro("counts", &Histogram::counts)
        .def_prop_ro("sum", &Histogram::sum);
    m.def("add_tokens", &add_tokens, "running"_a, "ids"_a, "indices"_a, "token_ids"_a, "now_s"_a);
    bind_text(m);
}

}  // namespace pdserve
