// Checks every tensor of a model against its sizes, once.

#include "read_model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../linear/packed_matrix.h"
#include "../tensor_view.h"

namespace nb = nanobind;

namespace pdserve::decoder {

namespace {

// Of a rank's groups. Files have [channels, kernel], of which the first are all groups' queries, then
// all keys.
std::vector<float> taps_of(const Sizes& sizes, const float* convolution) {
    const recurrent::Shape& shape = sizes.recurrent;
    const int64_t dims[] = {shape.key_dim, shape.key_dim, shape.group_size * shape.value_dim};
    std::vector<float> taps;
    taps.reserve(shape.num_groups * (dims[0] + dims[1] + dims[2]) * shape.kernel);
    for (int64_t own = 0; own < shape.num_groups; ++own) {
        const int64_t group = shape.first_group + own;
        for (int64_t tap = 0; tap < shape.kernel; ++tap) {
            const float* part = convolution;
            for (int64_t dim : dims) {
                for (int64_t i = 0; i < dim; ++i) {
                    taps.push_back(part[(group * dim + i) * shape.kernel + tap]);
                }
                part += shape.model_groups * dim * shape.kernel;
            }
        }
    }
    return taps;
}

std::string text(const MatrixShape& shape) {
    return std::string(shape.is_gated ? "a gated" : "a plain") + " matrix of "
        + std::to_string(shape.num_out) + " x " + std::to_string(shape.num_in);
}

// Reads tensors, and keeps a reference to each one that the model points into.
class Reader {
public:
    Reader(std::vector<nb::object>& owners, const Sizes& sizes) : owners_(owners), sizes_(sizes) {}

    const float* read(nb::object object, const std::string& name, int64_t size) {
        return numbers(std::move(object), name, {size}, "[size]");
    }

    const float* numbers(nb::object object, const std::string& name,
        std::initializer_list<int64_t> shape, const char* meaning) {
        const TensorView numbers(object, name.c_str());
        numbers.expect_type({ElementType::kFloat32});
        numbers.expect_shape(shape, meaning);
        numbers.expect_contiguous();
        owners_.push_back(std::move(object));
        return numbers.data<float>();
    }

    linear::PackedMatrix read(nb::object object, const std::string& name, MatrixShape shape) {
        linear::OwnedMatrix owned = linear::read_packed(object, name.c_str());
        const linear::PackedMatrix matrix = owned.matrix;
        if (shape.num_in == 0) shape.num_in = matrix.num_in;
        const MatrixShape found{matrix.num_out, matrix.num_in, matrix.is_gated};
        if (found != shape) raise_value_error(name, text(shape), text(found));
        for (nb::object* tensor : {&owned.weights, &owned.scales, &owned.bias}) {
            owners_.push_back(std::move(*tensor));
        }
        return matrix;
    }

    const void* embedding(nb::object object, bool is_bfloat16) {
        const TensorView table(object, "embedding");
        table.expect_type({is_bfloat16 ? ElementType::kBFloat16 : ElementType::kFloat32});
        table.expect_shape({sizes_.num_token_ids, sizes_.hidden}, "[num_token_ids, hidden_size]");
        table.expect_contiguous();
        owners_.push_back(std::move(object));
        return table.data<void>();
    }

    Layer layer(nb::handle object, const std::string& prefix, bool is_parallel) {
        Layer layer{};
        const auto norms = nb::cast<nb::dict>(object.attr("norms"));
        expect_all_taken(norms, prefix + "norms", take(norms, prefix, kNorms, layer));
        if ((layer.q_norm == nullptr) != (layer.k_norm == nullptr)) {
            raise_value_error(prefix + "k_norm", "a norm if and only if q_norm is one", "otherwise");
        }
        expect_norm(prefix + "attention_norm", layer.attention_norm, layer.after_attention_norm);
        if (!is_parallel) expect_norm(prefix + "mlp_norm", layer.mlp_norm, layer.after_mlp_norm);
        const auto matrices = nb::cast<nb::dict>(object.attr("matrices"));
        const bool has_state = matrices.contains("recurrent_in");
        size_t taken = has_state ? take(matrices, prefix, kRecurrentMixer, layer)
            : sizes_.is_latent() ? take(matrices, prefix, kLatentMixer, layer)
                                 : take(matrices, prefix, kMixer, layer);
        read_state(has_state, prefix, layer);
        read_heads(object.attr("heads"), prefix, layer);
        const nb::object experts = object.attr("experts");
        if (experts.is_none()) {
            taken += take(matrices, prefix, kMlp, layer.mlp);
        } else {
            layer.experts = mixture(experts, matrices["router"], prefix);
            ++taken;
            if (matrices.contains("shared_down")) {
                taken += take(matrices, prefix, kSharedMlp, layer.experts.shared);
            }
            if (matrices.contains("shared_weight")) {
                ++taken;
                layer.experts.shared_weight = read(matrices["shared_weight"],
                    prefix + "shared_weight", MatrixShape{1, sizes_.hidden});
            }
        }
        expect_all_taken(matrices, prefix + "matrices", taken);
        return layer;
    }

private:
    static void expect_norm(const std::string& name, const float* before, const float* after) {
        if (before == nullptr && after == nullptr) {
            raise_value_error(name, "one, or one behind", "neither");
        }
    }

    void read_state(bool has_state, const std::string& prefix, Layer& layer) {
        for (const float* vector :
            {layer.convolution, layer.decay, layer.decay_bias, layer.value_norm}) {
            if ((vector != nullptr) == has_state) continue;
            raise_value_error(prefix + "norms",
                has_state ? "those of a layer with a state" : "none of a state", "others");
        }
        if (has_state) layer.taps = taps_of(sizes_, layer.convolution);
    }

    void read_heads(nb::handle heads, const std::string& prefix, Layer& layer) {
        const auto expected = static_cast<size_t>(sizes_.is_latent() ? sizes_.num_heads : 0);
        if (nb::len(heads) != expected) {
            raise_value_error(prefix + "heads", std::to_string(expected),
                std::to_string(nb::len(heads)));
        }
        if (!sizes_.is_latent()) return;
        const bool has_rank = sizes_.latent.query_rank > 0;
        if (layer.latent_norm == nullptr || (layer.query_latent_norm != nullptr) != has_rank
            || (layer.query_latent.weights != nullptr) != has_rank) {
            raise_value_error(prefix + "norms", "those of latent vectors", "others");
        }
        for (nb::handle head : heads) {
            const std::string name = prefix + "heads[" + std::to_string(layer.heads.size()) + "].";
            const auto matrices = nb::cast<nb::dict>(head);
            const size_t taken = take(matrices, name, kLatentHead, layer.heads.emplace_back());
            expect_all_taken(matrices, name, taken);
        }
    }

    Choice choice(nb::handle object, int64_t count, const std::string& prefix) {
        const Choice choice{
            .is_sigmoid = nb::cast<std::string>(nb::str(object.attr("scoring"))) == "sigmoid",
            .num_groups = nb::cast<int64_t>(object.attr("num_groups")),
            .num_chosen_groups = nb::cast<int64_t>(object.attr("num_chosen_groups")),
            .best_of_group = nb::cast<int64_t>(object.attr("best_of_group")),
            .weight_scale = nb::cast<double>(object.attr("weight_scale")),
        };
        const bool is_divided = choice.num_groups >= 1 && count % choice.num_groups == 0
            && choice.num_chosen_groups >= 1 && choice.num_chosen_groups <= choice.num_groups
            && choice.best_of_group >= 1 && choice.best_of_group <= count / choice.num_groups;
        if (!is_divided) {
            raise_value_error(prefix + "choice.num_groups",
                "a divisor of " + std::to_string(count) + " experts, and others within it",
                std::to_string(choice.num_groups));
        }
        return choice;
    }

    Experts mixture(nb::handle object, nb::object router, const std::string& prefix) {
        Experts experts{};
        const nb::object mlps = object.attr("matrices");
        const auto count = static_cast<int64_t>(nb::len(mlps));
        experts.router =
            read(std::move(router), prefix + "router", MatrixShape{count, sizes_.hidden});
        experts.num_chosen = nb::cast<int64_t>(object.attr("num_chosen"));
        experts.normalizes_weights = nb::cast<bool>(object.attr("normalizes_weights"));
        experts.choice = choice(object.attr("choice"), count, prefix);
        if (nb::object bias = object.attr("score_bias"); !bias.is_none()) {
            experts.score_bias = read(std::move(bias), prefix + "score_bias", count);
        }
        if (experts.num_chosen < 1 || experts.num_chosen > count) {
            raise_value_error(prefix + "num_chosen", "1 to " + std::to_string(count) + " experts",
                std::to_string(experts.num_chosen));
        }
        for (nb::handle mlp : mlps) {
            const std::string name = prefix + "experts[" + std::to_string(experts.count()) + "].";
            take(nb::cast<nb::dict>(mlp), name, kMlp, experts.mlps.emplace_back());
            if (const int64_t inner = experts.mlps.back().inner(); inner != experts.inner()) {
                raise_value_error(name + "down",
                    "one of " + std::to_string(experts.inner()) + " inputs", std::to_string(inner));
            }
        }
        return experts;
    }

    // Reads all fields of a table; returns how many there were.
    template <class Fields, class Owner>
    size_t take(
        const nb::dict& dict, const std::string& prefix, const Fields& fields, Owner& owner) {
        size_t count = 0;
        for (const auto& field : fields) {
            const std::string name = prefix + field.name;
            if (dict.contains(field.name)) {
                owner.*field.member = read(dict[field.name], name, field.size(sizes_, owner));
                ++count;
            } else if (!field.is_optional) {
                raise_value_error(name, "one", "none");
            }
        }
        return count;
    }

    // What is not known would be left out.
    static void expect_all_taken(const nb::dict& dict, const std::string& name, size_t taken) {
        if (nb::len(dict) == taken) return;
        raise_value_error(name, std::to_string(taken) + " that this decoder computes with",
            nb::cast<std::string>(nb::str(dict.keys())));
    }

    std::vector<nb::object>& owners_;
    const Sizes& sizes_;
};

// Makes room for what a row needs in the layer.
void widen(Sizes& sizes, const Layer& layer) {
    const Experts& experts = layer.experts;
    const int64_t inner =
        layer.has_experts() ? experts.num_chosen * experts.inner() : layer.mlp.inner();
    sizes.inner = std::max({sizes.inner, inner, experts.shared.inner()});
    sizes.num_shared = std::max<int64_t>(sizes.num_shared, experts.has_shared());
    sizes.has_after_norms |=
        layer.after_attention_norm != nullptr || layer.after_mlp_norm != nullptr;
    sizes.num_experts = std::max(sizes.num_experts, experts.count());
    sizes.num_chosen = std::max(sizes.num_chosen, experts.num_chosen);
}

void check_number(const char* name, float number, bool is_in_range) {
    if (std::isfinite(number) && is_in_range) return;
    raise_value_error(name, "a finite number above 0", std::to_string(number));
}

void check(const ModelArguments& arguments, int64_t num_layers) {
    check_sizes(arguments.sizes);
    if (!std::isfinite(arguments.norm_eps) || arguments.norm_eps < 0) {
        raise_value_error("norm_eps", "0 or more", std::to_string(arguments.norm_eps));
    }
    const auto num_windows = static_cast<int64_t>(arguments.sliding_windows.size());
    if (num_layers == 0 || num_windows != num_layers) {
        raise_value_error("sliding_windows",
            "one for each of at least one layer, of which there are " + std::to_string(num_layers),
            std::to_string(num_windows));
    }
    for (int64_t window : arguments.sliding_windows) check_at_least("sliding_windows", window, 0);
    const auto num_ropes = static_cast<int64_t>(arguments.rope_scales.size());
    const auto num_choices = static_cast<int64_t>(arguments.layer_ropes.size());
    if (num_choices != num_layers) {
        raise_value_error("layer_ropes", std::to_string(num_layers) + ", one for each layer",
            std::to_string(num_choices));
    }
    for (int64_t rope : arguments.layer_ropes) {
        if (rope < 0 || rope >= num_ropes) {
            raise_value_error("layer_ropes", "of " + std::to_string(num_ropes) + " ropes",
                std::to_string(rope));
        }
    }
    const Arithmetic& numbers = arguments.arithmetic;
    for (float number :
        {numbers.attention_scale, numbers.embedding_scale, numbers.logit_scale}) {
        check_number("a scale", number, number > 0);
    }
    for (float number : {numbers.attention_cap, numbers.logit_cap}) {
        check_number("a cap", number, number >= 0);
    }
}

}  // namespace

OwnedModel read_model(const ModelArguments& arguments) {
    const nb::handle weights = arguments.weights;
    const nb::object layers = weights.attr("layers");
    check(arguments, static_cast<int64_t>(nb::len(layers)));
    OwnedModel owned{};  // weights that a stage does not have are null
    Model& model = owned.model;
    model.sizes = arguments.sizes;
    model.is_bfloat16 = arguments.is_bfloat16;
    model.norm_eps = static_cast<float>(arguments.norm_eps);
    model.rope_scales = arguments.rope_scales;
    model.sizes.num_ropes = static_cast<int64_t>(model.rope_scales.size());
    model.arithmetic = arguments.arithmetic;
    Reader reader(owned.owners, model.sizes);
    int num_with_kv = 0, num_with_state = 0;
    for (nb::handle layer : layers) {
        const size_t index = model.layers.size();
        model.layers.push_back(reader.layer(
            layer, "layers[" + std::to_string(index) + "].", model.arithmetic.is_parallel));
        model.layers.back().sliding_window = static_cast<int>(arguments.sliding_windows[index]);
        model.layers.back().rope = static_cast<int>(arguments.layer_ropes[index]);
        Layer& read = model.layers.back();
        read.pool_index = num_with_kv;
        read.state_number = num_with_state;
        ++(read.is_recurrent() ? num_with_state : num_with_kv);
        widen(model.sizes, read);
    }
    check_layers(model.sizes, num_with_kv);
    if (nb::object embedding = weights.attr("embedding"); nb::hasattr(embedding, "form")) {
        const MatrixShape shape{model.sizes.num_token_ids, model.sizes.hidden};
        model.coded_embedding = reader.read(std::move(embedding), "embedding", shape);
        if (model.coded_embedding.type != linear::WeightType::kCoded) {
            raise_value_error("embedding.form", "one with a coding", "another");
        }
    } else if (!embedding.is_none()) {
        model.embedding = reader.embedding(std::move(embedding), model.is_bfloat16);
    }
    if (nb::object final_norm = weights.attr("final_norm"); !final_norm.is_none()) {
        model.final_norm = reader.read(std::move(final_norm), "final_norm", model.sizes.hidden);
        const MatrixShape shape{model.sizes.num_token_ids, model.sizes.hidden};
        model.lm_head = reader.read(weights.attr("lm_head"), "lm_head", shape);
    }
    model.inverse_frequencies = reader.numbers(nb::borrow(arguments.inverse_frequencies),
        "inverse_frequencies", {2, model.sizes.num_ropes, model.sizes.rope_dim / 2},
        "[2, number of ropes, rope_dim / 2]");
    return owned;
}

}  // namespace pdserve::decoder
