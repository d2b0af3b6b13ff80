// Checks every tensor of a model against its sizes, once.

#include "read_model.h"

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

private:
    static std::string size_text(int64_t num_out, int64_t num_in, bool is_gated) {
        return "a " + std::string(is_gated ? "gated" : "plain") + " matrix of "
            + std::to_string(num_out) + " x " + std::to_string(num_in);
    }

    std::vector<nb::object>& owners_;
};

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
    layer.gate_up = matrix("gate_up", 2 * sizes.inner, sizes.hidden, true);
    layer.down = matrix("down", sizes.hidden, sizes.inner, false);
    return layer;
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

    const nb::object first_down = layers[0].attr("down");
    const linear::OwnedMatrix down = linear::read_packed(first_down, "layers[0].down");
    OwnedModel owned{};  // weights that a stage does not have are null
    Reader reader(owned.owners);
    Model& model = owned.model;
    model.sizes = {
        .first_layer = arguments.first_layer,
        .pool_layers = arguments.pool_layers,
        .vocab = arguments.vocab_size,
        .first_token_id = arguments.first_token_id,
        .num_token_ids = arguments.num_token_ids,
        .hidden = down.matrix.num_out,
        .inner = down.matrix.num_in,
        .num_heads = arguments.num_heads,
        .model_kv_heads = arguments.model_kv_heads,
        .first_kv_head = arguments.first_kv_head,
        .num_kv_heads = arguments.num_kv_heads,
        .head_dim = arguments.head_dim,
    };
    const Sizes& sizes = model.sizes;
    model.is_bfloat16 = arguments.is_bfloat16;
    model.norm_eps = static_cast<float>(arguments.norm_eps);
    for (nb::handle layer : layers) {
        const size_t index = model.layers.size();
        model.layers.push_back(
            read_layer(reader, layer, "layers[" + std::to_string(index) + "].", sizes));
        model.layers.back().sliding_window = static_cast<int>(arguments.sliding_windows[index]);
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
