// The checked launcher of sampling: reads arguments, runs the rows in threads, returns results.

#include "launch.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nanobind/ndarray.h>

#include "../bind.h"
#include "../isa/build_name.h"
#include "../tensor_view.h"
#include "../threads/thread_pool.h"
#include "row.h"

namespace nb = nanobind;

namespace pdserve {

namespace sampling {

namespace {

// With fewer logits than this, waking a worker takes longer than doing the work.
constexpr int64_t kFewLogits = 1 << 18;
constexpr int64_t kPassesOfDraw = 8;  // and of log-probabilities: what they take, in peaks

void check_params(const RowParams& params, int64_t row) {
    const auto expect = [&](bool is_good, const char* expected, double found) {
        const auto name = [&] { return "params[" + std::to_string(row) + "]"; };
        if (!is_good) raise_value_error(name(), expected, std::to_string(found));
    };
    expect(std::isfinite(params.temperature) && params.temperature >= 0.0,
        "a finite temperature of 0 or more", params.temperature);
    expect(params.top_p >= 0.0 && params.top_p <= 1.0, "top_p in [0, 1]", params.top_p);
    expect(params.min_p >= 0.0 && params.min_p <= 1.0, "min_p in [0, 1]", params.min_p);
}

std::vector<Row> rows_from(const TensorView& logits, nb::bytes packed_params) {
    logits.expect_type({ElementType::kFloat32});
    logits.expect_shape({-1, -1}, "[num_rows, vocab_size]");
    logits.expect_contiguous_last_dim();
    const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
    if (vocab_size < 1 || vocab_size > kMaxVocabSize) {
        raise_value_error("logits", "1 to " + std::to_string(kMaxVocabSize) + " columns",
            std::to_string(vocab_size));
    }
    const size_t num_bytes = num_rows * sizeof(RowParams);
    if (packed_params.size() != num_bytes) {
        raise_value_error("params", std::to_string(num_bytes) + " bytes, as many rows as logits",
            std::to_string(packed_params.size()));
    }
    std::vector<Row> rows(num_rows);
    for (int64_t i = 0; i < num_rows; ++i) {
        Row& row = rows[i];
        row.logits = logits.data<float>() + i * logits.stride(0);
        row.vocab_size = vocab_size;
        row.mask = nullptr;
        row.edits = nullptr;
        std::memcpy(&row.params, packed_params.c_str() + i * sizeof(RowParams), sizeof(RowParams));
        check_params(row.params, i);
    }
    return rows;
}

template <class T>
T field_as(nb::handle field, const char* expected) {
    T value;
    if (!nb::try_cast(field, value)) {
        raise_type_error("edits", expected, nb::inst_name(field).c_str());
    }
    return value;
}

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Borrowed from the caller's list, which outlives the view; so it must not be converted.
template <class T>
std::span<const T> view_of(nb::handle field, const char* expected) {
    Array<T> array;
    if (!nb::try_cast(field, array, false)) {
        raise_type_error("edits", expected, nb::inst_name(field).c_str());
    }
    return {array.data(), array.size()};
}

Edits edits_from(nb::tuple fields) {
    const Edits edits{
        .forbidden = view_of<int32_t>(fields[1], "forbidden ids in an array of int32"),
        .biased = view_of<int32_t>(fields[2], "biased ids in an array of int32"),
        .biases = view_of<float>(fields[3], "biases in an array of float32"),
        .seen = view_of<int32_t>(fields[4], "seen ids in an array of int32"),
        .repetition_penalty = field_as<float>(fields[5], "a number as repetition penalty"),
        .output = view_of<int32_t>(fields[6], "output ids in an array of int32"),
        .penalties = view_of<float>(fields[7], "penalties in an array of float32"),
    };
    const auto expect_as_many = [](Ids ids, Amounts amounts, const char* what) {
        if (ids.size() != amounts.size()) {
            raise_value_error("edits", std::to_string(ids.size()) + what,
                std::to_string(amounts.size()));
        }
    };
    expect_as_many(edits.biased, edits.biases, " biases");
    expect_as_many(edits.output, edits.penalties, " penalties");
    return edits;
}

int64_t row_from(nb::handle number, const char* argument, size_t num_rows) {
    int64_t row = 0;
    if (!nb::try_cast(number, row)) {
        raise_type_error(argument, "the number of a row", nb::inst_name(number).c_str());
    }
    if (row < 0 || row >= static_cast<int64_t>(num_rows)) {
        raise_value_error(
            argument, "rows below " + std::to_string(num_rows), std::to_string(row));
    }
    return row;
}

// Makes the rows point to their masks; the view must outlive them.
void attach_masks(const TensorView& masks, nb::list numbers, std::vector<Row>& rows) {
    masks.expect_type({ElementType::kInt32});
    const int64_t num_masks = nb::len(numbers);
    const int64_t num_words = rows.empty() ? 0 : (rows[0].vocab_size + 31) / 32;
    masks.expect_shape({num_masks, num_words}, "[num_masked, ceil(vocab_size / 32)]");
    masks.expect_contiguous_last_dim();
    for (int64_t i = 0; i < num_masks; ++i) {
        const int64_t row = row_from(numbers[i], "masked_rows", rows.size());
        rows[row].mask = masks.data<uint32_t>() + i * masks.stride(0);
    }
}

// Reads the edits, and makes the rows point to them.
std::vector<Edits> attach_edits(nb::list fields, std::vector<Row>& rows) {
    std::vector<Edits> edits;
    edits.reserve(fields.size());  // so that they stay where they are
    for (nb::handle item : fields) {
        const auto edit = field_as<nb::tuple>(item, "tuples");
        if (edit.size() != 8) {
            raise_value_error("edits", "tuples of 8", std::to_string(edit.size()));
        }
        const int64_t row = row_from(edit[0], "edits", rows.size());
        edits.push_back(edits_from(edit));
        rows[row].edits = &edits.back();
    }
    return edits;
}

std::vector<Choice> choose_all(const std::vector<Row>& rows, const Kernels& kernels) {
    std::vector<Choice> choices(rows.size());
    const auto choose_one = [&](int64_t i) {
        thread_local Workspace workspace;
        choices[i] = choose(rows[i], kernels, workspace);
    };
    const int64_t num_rows = rows.size();
    int64_t num_logits = 0;
    for (const Row& row : rows) {
        const bool is_plain = row.params.temperature == 0.0 && row.params.num_logprobs < 0;
        num_logits += row.vocab_size * (is_plain ? 1 : kPassesOfDraw);
    }
    if (num_logits <= kFewLogits) {
        for (int64_t i = 0; i < num_rows; ++i) choose_one(i);
    } else {
        ThreadPool::instance().parallel_for(num_rows, choose_one);
    }
    return choices;
}

template <class T>
nb::list list_of(const std::vector<T>& values) {
    nb::list result;
    for (const T value : values) result.append(value);
    return result;
}

nb::tuple sample(nb::handle logits_object, nb::bytes packed_params, nb::list edit_fields,
    const char* variant_name, nb::object masks_object, nb::list masked_rows) {
    const TensorView logits(logits_object, "logits");
    std::vector<Row> rows = rows_from(logits, packed_params);
    std::optional<TensorView> masks;
    if (!masks_object.is_none()) {
        masks.emplace(masks_object, "masks");
        attach_masks(*masks, masked_rows, rows);
    } else if (masked_rows.size()) {
        raise_value_error("masked_rows", "none without masks", std::to_string(masked_rows.size()));
    }
    const std::vector<Edits> edits = attach_edits(edit_fields, rows);
    const Kernels& kernels = PDSERVE_OF_VARIANT(variant_from(variant_name), Kernels);
    std::vector<Choice> choices;
    {
        nb::gil_scoped_release release;
        choices = choose_all(rows, kernels);
    }
    nb::list token_ids, logprobs;
    for (size_t i = 0; i < rows.size(); ++i) {
        const Choice& choice = choices[i];
        token_ids.append(choice.token_id);
        if (rows[i].params.num_logprobs < 0) continue;
        logprobs.append(nb::make_tuple(
            i, choice.logprob, list_of(choice.top_ids), list_of(choice.top_logprobs)));
    }
    return nb::make_tuple(token_ids, logprobs);
}

}  // namespace

}  // namespace sampling

void bind_sampling(nb::module_& m) {
    using nb::arg;
    m.def("sample", &sampling::sample, arg("logits"), arg("params"), arg("edits"),
        arg("variant") = "", arg("masks") = nb::none(), arg("masked_rows") = nb::list(),
        "One token, and log-probabilities where asked for, for each row.");
}

}  // namespace pdserve
