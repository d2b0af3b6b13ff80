#include "read_adapter.h"

#include <string>
#include <utility>

#include <nanobind/stl/vector.h>

#include "../../linear/packed_matrix.h"
#include "../../tensor_view.h"

namespace nb = nanobind;

namespace pdserve::decoder {

namespace {

using linear::PackedMatrix;

template <class Fields, class Owner>
const PackedMatrix* find(const Fields& fields, const Owner& owner, const std::string& name) {
    for (const auto& field : fields) {
        if (name == field.name) return &(owner.*field.member);
    }
    return nullptr;
}

// `expert`: of a layer's experts, or of the heads of latent attention; -1: of neither.
const PackedMatrix* find(const Layer& layer, int64_t expert, const std::string& name) {
    const Experts& experts = layer.experts;
    const auto num_heads = static_cast<int64_t>(layer.heads.size());
    if (name == "key" || name == "value") {
        return expert >= 0 && expert < num_heads ? find(kLatentHead, layer.heads[expert], name)
                                                 : nullptr;
    }
    if (expert >= 0) {
        return expert < experts.count() ? find(kMlp, experts.mlps[expert], name) : nullptr;
    }
    if (name == "router") return &experts.router;
    if (name == "shared_weight") return &experts.shared_weight;
    if (const auto* found = find(kMixer, layer, name)) return found;
    if (const auto* found = find(kLatentMixer, layer, name)) return found;
    if (const auto* found = find(kSharedMlp, experts.shared, name)) return found;
    return find(kMlp, layer.mlp, name);
}

class Reader {
public:
    Reader(OwnedAdapter& owned, const Model& model) : owned_(owned), model_(model) {}

    // (layer, expert or -1, name, addition)
    void add(nb::handle entry) {
        const auto layer = nb::cast<int64_t>(entry[0]);
        const auto expert = nb::cast<int64_t>(entry[1]);
        const auto name = nb::cast<std::string>(entry[2]);
        const auto num_layers = static_cast<int64_t>(model_.layers.size());
        const PackedMatrix* of = layer >= 0 && layer < num_layers
            ? find(model_.layers[layer], expert, name)
            : nullptr;
        if (of == nullptr || of->weights == nullptr) {
            raise_value_error("adapter", "matrices of the model", name);
        }
        owned_.adapter.additions[of] = addition(entry[3], *of);
    }

    Addition addition(nb::handle object, const PackedMatrix& of) {
        Addition made{};
        made.a = matrix(object.attr("a"), "a", -1, of.num_in);
        const int64_t num_lanes = linear::num_lanes_of(of);
        const PackedMatrix b = matrix(object.attr("b"), "b", num_lanes, -1);
        const bool is_bfloat16 = b.type == linear::WeightType::kBFloat16;
        if ((!is_bfloat16 && b.type != linear::WeightType::kFloat32) || b.num_in % 2 != 0) {
            raise_value_error("b", "float32 or bfloat16, and an even number of ranks", "another");
        }
        nb::object first_ranks = object.attr("first_ranks");
        const TensorView firsts(first_ranks, "first_ranks");
        firsts.expect_type({ElementType::kInt32});
        firsts.expect_shape({num_lanes / linear::kPanelOutputs}, "[panels]");
        firsts.expect_contiguous();
        const auto* numbers = firsts.data<int32_t>();
        for (int64_t panel = 0; panel < firsts.size(0); ++panel) {
            if (numbers[panel] < -1 || numbers[panel] + b.num_in > made.a.num_out) {
                raise_value_error("first_ranks", "those of A", std::to_string(numbers[panel]));
            }
        }
        owned_.owners.push_back(std::move(first_ranks));
        made.b = {b.weights, is_bfloat16, b.num_in, numbers, b.bias, nullptr};
        if (nb::object factors = object.attr("factors"); !factors.is_none()) {
            made.b.factors = factors_of(std::move(factors), num_lanes);
        }
        return made;
    }

    const float* factors_of(nb::object object, int64_t num_lanes) {
        const TensorView factors(object, "factors");
        factors.expect_type({ElementType::kFloat32});
        factors.expect_shape({num_lanes}, "[panels * 16]");
        factors.expect_contiguous();
        owned_.owners.push_back(std::move(object));
        return factors.data<float>();
    }

    // -1: any size.
    PackedMatrix matrix(nb::object object, const char* name, int64_t num_out, int64_t num_in) {
        linear::OwnedMatrix read = linear::read_packed(object, name);
        const PackedMatrix& found = read.matrix;
        if (found.is_gated || (num_out >= 0 && found.num_out != num_out)
            || (num_in >= 0 && found.num_in != num_in)) {
            raise_value_error(name, std::to_string(num_out) + " x " + std::to_string(num_in),
                std::to_string(found.num_out) + " x " + std::to_string(found.num_in));
        }
        for (nb::object* tensor : {&read.weights, &read.scales, &read.bias}) {
            owned_.owners.push_back(std::move(*tensor));
        }
        return found;
    }

    const void* table(nb::object object, const char* name, int64_t num_rows, int64_t width) {
        if (object.is_none()) return nullptr;
        const TensorView rows(object, name);
        rows.expect_type({model_.is_bfloat16 ? ElementType::kBFloat16 : ElementType::kFloat32});
        rows.expect_shape({num_rows, width}, "[num_rows, width]");
        rows.expect_contiguous();
        owned_.owners.push_back(std::move(object));
        return rows.data<void>();
    }

    // (token ids, their rows), or None; the ids are those of the model, each once.
    std::vector<int64_t> ids(nb::handle pair) {
        auto found = nb::cast<std::vector<int64_t>>(pair[0]);
        for (int64_t id : found) {
            if (id < 0 || id >= model_.sizes.vocab) {
                raise_value_error("trained tokens", "ids of the vocabulary", std::to_string(id));
            }
        }
        return found;
    }

private:
    OwnedAdapter& owned_;
    const Model& model_;
};

}  // namespace

OwnedAdapter read_adapter(nb::handle object, const Model& model) {
    OwnedAdapter owned{};
    Adapter& adapter = owned.adapter;
    Reader reader(owned, model);
    const int64_t vocab = model.sizes.vocab, hidden = model.sizes.hidden;
    const int64_t own_vocab = model.sizes.num_token_ids;
    for (nb::handle entry : object.attr("additions")) reader.add(entry);
    if (nb::object head = object.attr("head"); !head.is_none()) {
        adapter.additions[&model.lm_head] = reader.addition(head, model.lm_head);
    }
    if (nb::object head = object.attr("own_head"); !head.is_none()) {
        adapter.lm_head = reader.matrix(std::move(head), "own_head", own_vocab, hidden);
    }
    adapter.embedding = reader.table(object.attr("own_embedding"), "own_embedding", vocab, hidden);
    if (nb::object b = object.attr("embedding_b"); !b.is_none()) {
        adapter.embedding_b = reader.matrix(std::move(b), "embedding_b", hidden, -1);
        adapter.embedding_a = reader.table(
            object.attr("embedding_a"), "embedding_a", vocab, adapter.embedding_b.num_in);
    }
    TrainedTokens& trained = adapter.trained;
    if (nb::object pair = object.attr("trained_embedding"); !pair.is_none()) {
        for (int64_t id : reader.ids(pair)) {
            trained.rows.emplace(id, static_cast<int64_t>(trained.rows.size()));
        }
        const auto num_rows = static_cast<int64_t>(trained.rows.size());
        trained.embedding = reader.table(pair[1], "trained_embedding", num_rows, hidden);
    }
    if (nb::object pair = object.attr("trained_head"); !pair.is_none()) {
        trained.head_ids = reader.ids(pair);
        const auto num_rows = static_cast<int64_t>(trained.head_ids.size());
        trained.head = reader.matrix(pair[1], "trained_head", num_rows, hidden);
    }
    return owned;
}

}  // namespace pdserve::decoder
