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

// Reads tensors, and keeps a reference to each one that the model points into.
class Reader {
public:
    explicit Reader(std::vector<nb::object>& owners) : owners_(owners) {}

    const float* vector(nb::object object, const std::string& name, int64_t size) {
        const TensorView vector(object, name.c_str());
        vector.expect_type({ElementType::kFloat32});
        vector.expect_shape({size}, "[size]");
        vector.expect_contiguous();
        owners_.push_back(std::move(object));
        return vector.data<float>();
    }

    const void* embedding(nb::object object, bool is_bfloat16, const Sizes& sizes) {
        const TensorView table(object, "embedding");
        table.expect_type({is_bfloat16 ? ElementType::kBFloat16 : ElementType::kFloat32});
        table.expect_shape({sizes.num_token_ids, sizes.hidden}, "[num_token_ids, hidden_size]");
        table.expect_contiguous();
        owners_.push_back(std::move(object));
        return table.data<void>();
    }

    linear::PackedMatrix matrix(nb::handle object, const std::string& name, int64_t num_out,
        int64_t num_in, bool is_gated) {
        linear::OwnedMatrix owned = linear::read_packed(object, name.c_str());
        const linear::PackedMatrix matrix = owned.matrix;
        if (matrix.num_out != num_out || matrix.num_in != num_in || matrix.is_gated != is_gated) {
            raise_value_error(name, size_text(num_out, num_in, is_gated),
                size_text(matrix.num_out, matrix.num_in, matrix.is_gated));
        }
        for (nb::object* tensor : {&owned.weights, &owned.scales, &owned.bias}) {
            owners_.push_back(std::move(*tensor));
        }
        return matrix;
    }

    // The width is what the weights have of it: a rank has a share.
    Mlp mlp(nb::handle object, const std::string& prefix, const Sizes& sizes) {
        const std::string name = prefix + "down";
        const nb::object down = object.attr("down");
        const int64_t inner = linear::read_packed(down, name.c_str()).matrix.num_in;
        return {matrix(object.attr("gate_up"), prefix + "gate_up", 2 * inner, sizes.hidden, true),
            matrix(down, name, sizes.hidden, inner, false)};
    }

private:
    static std::string size_text(int64_t num_out, int64_t num_in, bool is_gated) {
        return "a " + std::string(is_gated ? "gated" : "plain") + " matrix of "
            + std::to_string(num_out) + " x " + std::to_string(num_in);
    }

    std::vector<nb::object>& owners_;
};

Experts read_experts(
    Reader& reader, nb::handle object, const std::string& prefix, const Sizes& sizes) {
    Experts experts{};
    const nb::object mlps = object.attr("mlps");
    const auto count = static_cast<int64_t>(nb::len(mlps));
    experts.router =
        reader.matrix(object.attr("router"), prefix + "router", count, sizes.hidden, false);
    experts.num_chosen = nb::cast<int64_t>(object.attr("num_chosen"));
    experts.normalizes_weights = nb::cast<bool>(object.attr("normalizes_weights"));
    if (experts.num_chosen < 1 || experts.num_chosen > count) {
        raise_value_error(prefix + "num_chosen", "1 to " + std::to_string(count) + " experts",
            std::to_string(experts.num_chosen));
    }
    for (nb::handle mlp : mlps) {
        const std::string name = prefix + "mlps[" + std::to_string(experts.count()) + "].";
        experts.mlps.push_back(reader.mlp(mlp, name, sizes));
        if (experts.mlps.back().inner() != experts.inner()) {
            raise_value_error(name + "down", "one of " + std::to_string(experts.inner()) + " inputs",
                std::to_string(experts.mlps.back().inner()));
        }
    }
    return experts;
}

Layer read_layer(
    Reader& reader, nb::handle object, const std::string& prefix, const Sizes& sizes) {
    const auto vector = [&](const char* name, int64_t size) {
        return reader.vector(object.attr(name), prefix + name, size);
    };
    const auto head_norm = [&](const char* name) {
        return object.attr(name).is_none() ? nullptr : vector(name, sizes.head_dim);
    };
    const auto matrix = [&](const char* name, int64_t num_out, int64_t num_in, bool is_gated) {
        return reader.matrix(object.attr(name), prefix + name, num_out, num_in, is_gated);
    };
    Layer layer{};
    layer.attention_norm = vector("attention_norm", sizes.hidden);
    layer.qkv = matrix("qkv", sizes.qkv_width(), sizes.hidden, false);
    layer.q_norm = head_norm("q_norm");
    layer.k_norm = head_norm("k_norm");
    if ((layer.q_norm == nullptr) != (layer.k_norm == nullptr)) {
        raise_value_error(prefix + "k_norm", "a norm if and only if q_norm is one", "otherwise");
    }
    layer.attention_out = matrix("attention_out", sizes.hidden, sizes.query_width(), false);
    layer.mlp_norm = vector("mlp_norm", sizes.hidden);
    const nb::object experts = object.attr("experts");
    if (experts.is_none()) {
        layer.mlp = reader.mlp(object.attr("mlp"), prefix + "mlp.", sizes);
    } else {
        layer.experts = read_experts(reader, experts, prefix + "experts.", sizes);
    }
    return layer;
}

// Makes room for what a row needs in the layer.
void widen(Sizes& sizes, const Layer& layer) {
    const Experts& experts = layer.experts;
    const int64_t inner =
        layer.has_experts() ? experts.num_chosen * experts.inner() : layer.mlp.inner();
    sizes.inner = std::max(sizes.inner, inner);
    sizes.num_experts = std::max(sizes.num_experts, experts.count());
    sizes.num_chosen = std::max(sizes.num_chosen, experts.num_chosen);
}

void check_at_least(const char* name, int64_t value, int64_t least) {
    if (value < least || value > INT32_MAX) {
        raise_value_error(name, std::to_string(least) + " or more", std::to_string(value));
    }
}

void check_share(const char* name, int64_t first, int64_t count, int64_t total) {
    if (first < 0 || first > total - count) {
        raise_value_error(name,
            "a share of " + std::to_string(count) + " within " + std::to_string(total),
            std::to_string(first));
    }
}

void check_arguments(const ModelArguments& arguments, size_t num_layers) {
    check_at_least("num_kv_heads", arguments.num_kv_heads, 1);
    check_at_least("num_heads", arguments.num_heads, 1);
    check_at_least("head_dim", arguments.head_dim, 2);
    if (arguments.num_heads % arguments.num_kv_heads != 0) {
        raise_value_error("num_heads",
            "a multiple of " + std::to_string(arguments.num_kv_heads) + " KV heads",
            std::to_string(arguments.num_heads));
    }
    if (arguments.head_dim % 2 != 0) {
        raise_value_error("head_dim", "an even number", std::to_string(arguments.head_dim));
    }
    if (!std::isfinite(arguments.norm_eps) || arguments.norm_eps < 0) {
        raise_value_error("norm_eps", "0 or more", std::to_string(arguments.norm_eps));
    }
    if (num_layers == 0 || arguments.sliding_windows.size() != num_layers) {
        raise_value_error("sliding_windows",
            "one for each of at least one layer, of which there are " + std::to_string(num_layers),
            std::to_string(arguments.sliding_windows.size()));
    }
    for (int64_t window : arguments.sliding_windows) check_at_least("sliding_windows", window, 0);
}

}  // namespace

OwnedModel read_model(const ModelArguments& arguments) {
    const nb::handle weights = arguments.weights;
    const nb::object layers = weights.attr("layers");
    check_arguments(arguments, nb::len(layers));
    const auto num_layers = static_cast<int64_t>(nb::len(layers));
    check_share(
        "first_token_id", arguments.first_token_id, arguments.num_token_ids, arguments.vocab_size);
    check_share(
        "first_kv_head", arguments.first_kv_head, arguments.num_kv_heads, arguments.model_kv_heads);
    check_share("first_layer", arguments.first_layer, num_layers, arguments.pool_layers);

    const nb::object first_out = layers[0].attr("attention_out");
    const linear::OwnedMatrix out = linear::read_packed(first_out, "layers[0].attention_out");
    OwnedModel owned{};  // weights that a stage does not have are null
    Reader reader(owned.owners);
    Model& model = owned.model;
    model.sizes = {
        .first_layer = arguments.first_layer,
        .pool_layers = arguments.pool_layers,
        .vocab = arguments.vocab_size,
        .first_token_id = arguments.first_token_id,
        .num_token_ids = arguments.num_token_ids,
        .hidden = out.matrix.num_out,
        .inner = 0,  // this and the next two are those of the layers
        .num_experts = 0,
        .num_chosen = 0,
        .num_heads = arguments.num_heads,
        .model_kv_heads = arguments.model_kv_heads,
        .first_kv_head = arguments.first_kv_head,
        .num_kv_heads = arguments.num_kv_heads,
        .head_dim = arguments.head_dim,
    };
    Sizes& sizes = model.sizes;
    model.is_bfloat16 = arguments.is_bfloat16;
    model.norm_eps = static_cast<float>(arguments.norm_eps);
    for (nb::handle layer : layers) {
        const size_t index = model.layers.size();
        model.layers.push_back(
            read_layer(reader, layer, "layers[" + std::to_string(index) + "].", sizes));
        model.layers.back().sliding_window = static_cast<int>(arguments.sliding_windows[index]);
        widen(sizes, model.layers.back());
    }
    nb::object embedding = weights.attr("embedding");
    if (!embedding.is_none()) {
        model.embedding = reader.embedding(std::move(embedding), model.is_bfloat16, sizes);
    }
    if (!weights.attr("final_norm").is_none()) {
        model.final_norm = reader.vector(weights.attr("final_norm"), "final_norm", sizes.hidden);
        model.lm_head = reader.matrix(
            weights.attr("lm_head"), "lm_head", sizes.num_token_ids, sizes.hidden, false);
    }
    model.inverse_frequencies = reader.vector(nb::borrow(arguments.inverse_frequencies),
        "inverse_frequencies", sizes.head_dim / 2);
    model.rope_scale = arguments.rope_scale;
    return owned;
}

}  // namespace pdserve::decoder
