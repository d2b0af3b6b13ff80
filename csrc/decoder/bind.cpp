// pdserve._native.Decoder: checks arguments with the interpreter lock held, and computes the whole
// step without it.

#include "bind.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../bind.h"
#include "../ranks/bind.h"
#include "adapters/read_adapter.h"
#include "forward.h"
#include "read_model.h"
#include "step/step_view.h"

namespace nb = nanobind;

namespace pdserve {

namespace decoder {

namespace {

class Decoder {
public:
    // `group` is a RankGroup or None, and kept.
    Decoder(OwnedModel owned, Variant variant, nb::object group)
        : owned_(std::move(owned)),
          group_(std::move(group)),
          forward_(owned_.model, variant, checked_group()) {}
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    void logits(nb::handle token_ids, nb::handle positions, nb::handle query_start,
        nb::handle context_lens, nb::handle block_tables, nb::handle sampled_rows,
        nb::handle kv_pool, nb::handle out,
        const std::vector<int64_t>& ends, nb::handle done, nb::handle state_rows,
        nb::handle states_out, nb::handle taps, nb::handle taps_out,
        const std::vector<std::string>& adapters, const std::vector<int64_t>& adapted_from,
        nb::handle companions, nb::handle places, nb::handle state_tables,
        nb::handle kept_after) {
        // Kept until the step is over, whatever is dropped meanwhile.
        std::vector<std::shared_ptr<const OwnedAdapter>> kept;
        const std::vector<const Adapter*> own = find(adapters, kept, query_start);
        if (own.size() != adapted_from.size()) {
            raise_value_error("adapted_from", "one for each request",
                std::to_string(adapted_from.size()));
        }
        if (!companions.is_none() && !group_.is_none()) {
            throw nb::value_error("companions: of one rank that has all layers");
        }
        const StepView step(owned_.model, token_ids, positions, query_start, context_lens,
            block_tables, sampled_rows, kv_pool, out, state_rows, states_out, taps, taps_out,
            companions, places, state_tables, kept_after);
        Written written;
        if (!ends.empty()) {
            written = [&](int64_t num_layers) {
                if (std::find(ends.begin(), ends.end(), num_layers) == ends.end()) return;
                nb::gil_scoped_acquire acquire;
                done(num_layers);
            };
        }
        const Turn turn(is_running_);
        nb::gil_scoped_release release;
        Inputs inputs = step.inputs(owned_.model);
        inputs.adapters = own.empty() ? nullptr : own.data();
        inputs.adapted_from = adapted_from.data();
        inputs.pool.rounding = rounding_;
        forward_.run(inputs, written);
    }

    void take_adapter(const std::string& digest, nb::handle adapter) {
        adapters_[digest] =
            std::make_shared<const OwnedAdapter>(read_adapter(adapter, owned_.model));
    }

    void round_kv(const std::string& format) { rounding_ = attention::codes_named(format); }

    void drop_adapter(const std::string& digest) { adapters_.erase(digest); }

    size_t workspace_bytes() const { return forward_.workspace_bytes(); }

private:
    // There is one workspace. It is acquired and released with the interpreter lock held.
    class Turn {
    public:
        explicit Turn(bool& is_running) : is_running_(is_running) {
            if (is_running_) throw std::runtime_error("another step of this decoder is running");
            is_running_ = true;
        }
        ~Turn() { is_running_ = false; }

    private:
        bool& is_running_;
    };

    // The adapters of the requests, which are named by digests; "": none.
    std::vector<const Adapter*> find(const std::vector<std::string>& digests,
        std::vector<std::shared_ptr<const OwnedAdapter>>& kept, nb::handle query_start) const {
        std::vector<const Adapter*> found;
        if (digests.empty()) return found;
        const TensorView starts(query_start, "query_start");
        if (starts.size(0) != static_cast<int64_t>(digests.size()) + 1) {
            raise_value_error("adapters", "one for each request", std::to_string(digests.size()));
        }
        for (const std::string& digest : digests) {
            const auto known = adapters_.find(digest);
            if (known == adapters_.end() && !digest.empty()) {
                raise_value_error("adapters", "those that are loaded", digest);
            }
            found.push_back(digest.empty() ? nullptr : &known->second->adapter);
            if (!digest.empty()) kept.push_back(known->second);
        }
        return found;
    }

    // Null: there are no other ranks.
    ranks::Group* checked_group() {
        auto* const group =
            group_.is_none() ? nullptr : &nb::cast<ranks::OwnedGroup&>(group_).group();
        const bool is_first = group == nullptr || group->before() == nullptr;
        const bool is_last = group == nullptr || group->next() == nullptr;
        const auto check = [](const char* name, bool is_needed, bool is_there) {
            if (is_needed == is_there) return;
            raise_value_error(name, is_needed ? "one in this stage" : "none in this stage",
                is_there ? "one" : "none");
        };
        check("embedding", is_first, owned_.model.is_first_stage());
        check("final_norm", is_last, owned_.model.is_last_stage());
        return group;
    }

    OwnedModel owned_;
    nb::object group_;
    Forward forward_;
    std::unordered_map<std::string, std::shared_ptr<const OwnedAdapter>> adapters_;
    attention::KvFormat rounding_ = attention::KvFormat::kFloat32;  // none
    bool is_running_ = false;
};

linear::Result gated_result(const char* activation) {
    if (std::strcmp(activation, "silu") == 0) return linear::Result::kGatedSilu;
    if (std::strcmp(activation, "gelu_tanh") == 0) return linear::Result::kGatedGelu;
    if (std::strcmp(activation, "clamped") == 0) return linear::Result::kGatedClamped;
    raise_value_error("activation", "silu, gelu_tanh or clamped", activation);
}

// Of a LatentShape.
Latent latent_of(nb::handle shape) {
    const auto size = [&](const char* name) { return nb::cast<int64_t>(shape.attr(name)); };
    const nb::object query_rank = shape.attr("query_rank");
    return {
        .rank = size("rank"),
        .rope_dim = size("rope_dim"),
        .nope_dim = size("nope_dim"),
        .value_dim = size("value_dim"),
        .query_rank = query_rank.is_none() ? 0 : nb::cast<int64_t>(query_rank),
        .norm_eps = nb::cast<float>(shape.attr("norm_eps")),
    };
}

// Of a RecurrentShape, and the groups of a rank.
recurrent::Shape recurrent_of(nb::handle shape, int64_t first_group, int64_t num_groups) {
    const auto size = [&](const char* name) { return nb::cast<int64_t>(shape.attr(name)); };
    return {
        .num_groups = num_groups,
        .model_groups = size("num_groups"),
        .first_group = first_group,
        .group_size = size("group_size"),
        .key_dim = size("key_dim"),
        .value_dim = size("value_dim"),
        .kernel = size("kernel"),
    };
}

void make_decoder(Decoder* self, nb::handle weights, int64_t num_heads, int64_t num_kv_heads,
    int64_t model_kv_heads, int64_t first_kv_head, int64_t vocab_size, int64_t first_token_id,
    int64_t num_token_ids, int64_t first_layer, int64_t pool_layers, int64_t hidden_size, int64_t head_dim,
    bool is_bfloat16, double norm_eps, std::vector<int64_t> sliding_windows,
    nb::handle inverse_frequencies, std::vector<double> rope_scales,
    std::vector<int64_t> layer_ropes, const char* activation, double attention_scale,
    double attention_cap, double logit_cap, double embedding_scale,
    double logit_scale, bool centres_norms, bool norms_heads_together, bool is_parallel,
    const char* variant_name,
    nb::object group, nb::object latent, nb::object recurrent, int64_t first_group,
    int64_t num_groups, bool gates_attention) {
    const Variant variant = variant_from(variant_name);
    const Latent of_latent = latent.is_none() ? Latent{} : latent_of(latent);
    const Sizes sizes{
        .first_layer = first_layer,
        .pool_layers = pool_layers,
        .vocab = vocab_size,
        .first_token_id = first_token_id,
        .num_token_ids = num_token_ids,
        .hidden = hidden_size,
        .num_heads = num_heads,
        .model_kv_heads = model_kv_heads,
        .first_kv_head = first_kv_head,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .rope_dim = latent.is_none() ? head_dim : of_latent.rope_dim,
        .latent = of_latent,
        .norms_heads_together = norms_heads_together,
        .recurrent = recurrent.is_none() ? recurrent::Shape{}
                                         : recurrent_of(recurrent, first_group, num_groups),
        .gates_attention = gates_attention,
    };
    const Arithmetic arithmetic{
        .gated = gated_result(activation),
        .attention_scale = static_cast<float>(attention_scale),
        .attention_cap = static_cast<float>(attention_cap),
        .logit_cap = static_cast<float>(logit_cap),
        .embedding_scale = static_cast<float>(embedding_scale),
        .logit_scale = static_cast<float>(logit_scale),
        .centres_norms = centres_norms,
        .is_parallel = is_parallel,
    };
    OwnedModel owned = read_model({weights, sizes, is_bfloat16, norm_eps,
        std::move(sliding_windows), inverse_frequencies, std::move(rope_scales),
        std::move(layer_ropes), arithmetic});
    new (self) Decoder(std::move(owned), variant, std::move(group));
}

}  // namespace

}  // namespace decoder

void bind_decoder(nb::module_& m) {
    using decoder::Decoder;
    using nb::arg;
    nb::class_<Decoder>(m, "Decoder", "A model on the CPU: one call computes a step.")
        .def("__init__", &decoder::make_decoder, arg("weights"), nb::kw_only(), arg("num_heads"),
            arg("num_kv_heads"), arg("model_kv_heads"), arg("first_kv_head"), arg("vocab_size"),
            arg("first_token_id"), arg("num_token_ids"), arg("first_layer"), arg("pool_layers"),
            arg("hidden_size"), arg("head_dim"), arg("is_bfloat16"), arg("norm_eps"), arg("sliding_windows"),
            arg("inverse_frequencies"), arg("rope_scales"), arg("layer_ropes"),
            arg("activation"), arg("attention_scale"), arg("attention_cap"), arg("logit_cap"),
            arg("embedding_scale"), arg("logit_scale"), arg("centres_norms"),
            arg("norms_heads_together"), arg("is_parallel"), arg("variant") = "",
            arg("group") = nb::none(), arg("latent") = nb::none(), arg("recurrent") = nb::none(),
            arg("first_group") = 0, arg("num_groups") = 0, arg("gates_attention") = false)
        .def("logits", &Decoder::logits, arg("token_ids"), arg("positions"),
            arg("query_start"), arg("context_lens"), arg("block_tables"), arg("sampled_rows"), arg("kv_pool"),
            arg("out"), arg("ends") = std::vector<int64_t>(), arg("done") = nb::none(),
            arg("state_rows") = nb::none(), arg("states_out") = nb::none(),
            arg("taps") = nb::none(), arg("taps_out") = nb::none(),
            arg("adapters") = std::vector<std::string>(),
            arg("adapted_from") = std::vector<int64_t>(), arg("companions") = nb::none(),
            arg("places") = nb::none(), arg("state_tables") = nb::none(),
            arg("kept_after") = nb::none(),
            "Compute a step: keys and values into the pool, scores of the sampled rows into out.")
        .def("round_kv", &Decoder::round_kv, arg("codes"),
            "Round all KV to what rows of these codes can hold.")
        .def("take_adapter", &Decoder::take_adapter, arg("digest"), arg("adapter"),
            "Make an adapter ready for steps.")
        .def("drop_adapter", &Decoder::drop_adapter, arg("digest"), "Forget one.")
        .def_prop_ro("workspace_bytes", &Decoder::workspace_bytes,
            "Memory for activations, as large as the largest step so far has needed.");
}

}  // namespace pdserve
