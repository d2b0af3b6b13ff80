"""What config.json would say of the model in a GGUF file.

Keys of an architecture that are not known here could change its arithmetic, so they are refused by
name, as fields of config.json are in `engine/models/families.py`. What a file does not say (biases,
tied heads, the size of the vocabulary) is seen from its tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from pdserve.model_files.gguf.architectures import ARCHITECTURES, Architecture
from pdserve.model_files.gguf.fields import GgufFields
from pdserve.model_files.gguf.model import GgufModel
from pdserve.model_files.gguf.names import EMBEDDING, HEAD, ROPE_DIVISORS, ROPE_FACTORS, SCORE_BIAS
from pdserve.shared.errors import MisshapedTensor, MissingTensor, ModelError, UnknownArchitecture

_READ: Final = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_attn_factor",
        "rope.scale_linear",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        # Of these, nothing depends on.
        "vocab_size",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "pooling_type",  # only embeddings do
    }
)
# With these values, a key changes nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}

_YARN: Final = {  # what config.json says, if it does
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}


def architecture_of(model: GgufModel) -> str:
    """What the file says, such as "llama"."""
    return GgufFields(model.values, model.path).text("general.architecture")


def served_architecture(model: GgufModel) -> str:
    """As architecture_of. Raises ModelError: it is no model, or of none that is served."""
    kind = GgufFields(model.values, model.path).text("general.type", "model")
    if kind != "model":
        raise ModelError(
            f"{model.path} is no model, but of the type {kind} (general.type): name the file of "
            "the language model that it is for"
        )
    name = architecture_of(model)
    if name not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"{model.path} is of the architecture {name}; supported are "
            f"{', '.join(ARCHITECTURES)}: take a model of these"
        )
    return name


def config_of(model: GgufModel, end_ids: Collection[int]) -> dict[str, Any]:
    """Return what config.json would hold.

    Raises:
        UnknownArchitecture: it is not served; lists those that are.
        ModelError: a key is missing, of the wrong type, or asks for arithmetic that is not served.
    """
    name = served_architecture(model)
    fields = GgufFields(model.values, model.path, f"{name}.")
    architecture = ARCHITECTURES[name]
    if any(SCORE_BIAS in tensor for tensor in model.tensors):
        architecture = architecture.with_score_bias or architecture
    _refuse_foreign(fields, architecture)
    config = _sizes(fields, model, architecture)
    config |= _rope(fields, model, config["head_dim"])
    config |= architecture.own(fields)
    return config | {
        "architectures": [architecture.called(fields)],
        "tie_word_embeddings": HEAD not in model.tensors,
        "dtype": _dtype(model),
        "eos_token_id": sorted(end_ids),
    }


def _refuse_foreign(fields: GgufFields, architecture: Architecture) -> None:
    for key in fields.names():
        if key in _READ or key in architecture.reads:
            continue
        value = fields.raw(key)
        if not isinstance(value, list) and value in _NEUTRAL.get(key, ()):
            continue
        raise fields.error(key, "absent: it asks for arithmetic that is not served")


def _sizes(fields: GgufFields, model: GgufModel, architecture: Architecture) -> dict[str, Any]:
    num_heads = fields.integer("attention.head_count")
    if EMBEDDING not in model.tensors:
        raise MissingTensor(f"{model.path} lacks {EMBEDDING}")
    config: dict[str, Any] = {
        "vocab_size": model.tensors[EMBEDDING].shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(fields, architecture),
        "max_position_embeddings": fields.integer("context_length"),
        "sliding_window": fields.integer("attention.sliding_window", 0, minimum=0) or None,
        "attention_bias": _has_bias(model, "attn_q"),
        "mlp_bias": _has_bias(model, "ffn_down"),
    }
    if "attention.layer_norm_epsilon" not in fields:
        config["rms_norm_eps"] = fields.number("attention.layer_norm_rms_epsilon")
    if not architecture.is_latent and fields.integer("expert_count", 0, minimum=0):
        config |= _experts(fields, config["intermediate_size"])
    if architecture_of(model) in ("qwen2", "qwen2moe"):
        del config["attention_bias"]  # of the family: config.json does not say it
    return config


def _head_dim(fields: GgufFields, architecture: Architecture) -> int:
    """With latent attention what is rotated of it, as config.json of DeepSeek V3 has it."""
    if architecture.is_latent:
        return fields.integer("rope.dimension_count")
    hidden, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"{head_dim}, the size of a head")
    return head_dim


def _experts(fields: GgufFields, width: int) -> dict[str, Any]:
    inner = fields.integer("expert_feed_forward_length", width)
    return {
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp does so for all of these architectures
        "moe_intermediate_size": inner,
        "intermediate_size": inner,
    }


def _has_bias(model: GgufModel, part: str) -> bool:
    return f"blk.0.{part}.bias" in model.tensors


def _rope(fields: GgufFields, model: GgufModel, head_dim: int) -> dict[str, Any]:
    scaling = fields.under("rope.scaling.")
    kind = scaling.text("type", "none")
    factor = scaling.number("factor", 1.0)
    if "rope.scale_linear" in fields and fields.number("rope.scale_linear") != 1.0:
        kind, factor = "linear", fields.number("rope.scale_linear")
    parameters: dict[str, Any] = {"rope_type": "default"}
    num_dims = fields.integer("rope.dimension_count", head_dim)
    if num_dims % 2 or num_dims > head_dim:
        raise fields.error("rope.dimension_count", f"even, and at most {head_dim}")
    num_pairs = num_dims // 2
    if ROPE_FACTORS["short_factor"] in model.tensors:
        parameters = _long_rope(scaling, model, num_pairs)
    elif ROPE_DIVISORS in model.tensors:
        if kind != "none":
            raise scaling.error("type", f"none, since there is {ROPE_DIVISORS}")
        parameters = {"rope_type": "divided", "divisors": _numbers(model, ROPE_DIVISORS, num_pairs)}
    elif kind != "none" and (kind, factor) != ("linear", 1.0):
        parameters = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = scaling.integer("original_context_length", fields.integer("context_length"))
        parameters["original_max_position_embeddings"] = original
        for key, ours in _YARN.items():
            if key in scaling:
                parameters[ours] = scaling.number(key)
        if scaling.raw("yarn_log_multiplier"):  # is a tenth of it, as are both of these models
            all_dim = 10 * scaling.number("yarn_log_multiplier")
            parameters |= {"mscale": all_dim, "mscale_all_dim": all_dim}
        if not ARCHITECTURES[architecture_of(model)].truncates_yarn:
            parameters["truncate"] = False
    if num_dims != head_dim:
        # Half a dimension more, so that rounding down gives their number.
        parameters["partial_rotary_factor"] = (num_dims + 0.5) / head_dim
    return {"rope_theta": fields.number("rope.freq_base", 10_000.0), "rope_parameters": parameters}


def _long_rope(scaling: GgufFields, model: GgufModel, num_pairs: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "longrope"}
    if scaling.raw("attn_factor"):
        parameters["attention_factor"] = scaling.number("attn_factor")
    for key, name in ROPE_FACTORS.items():
        if name not in model.tensors:
            raise MissingTensor(f"{model.path} lacks {name}")
        parameters[key] = _numbers(model, name, num_pairs)
    return parameters


def _numbers(model: GgufModel, name: str, num_pairs: int) -> list[float]:
    tensor = model.tensors[name]
    if tensor.shape != (num_pairs,):
        raise MisshapedTensor(
            f"{model.path}: {name} has the shape {list(tensor.shape)}, but a head "
            f"rotates {num_pairs} pairs"
        )
    blocks = tensor.type.blocks(tensor.data, num_pairs, range(1), range(num_pairs))
    row = tensor.type.decode_rows(blocks, range(num_pairs))[0]
    return [float(one) for one in row]


def _dtype(model: GgufModel) -> str:
    """The plain type that holds the matrices best: that of files that are not quantised."""
    kinds = {tensor.type.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def full_bytes(model: GgufModel) -> int:
    """Size of the weights as numbers of that type."""
    return model.num_elements * (4 if _dtype(model) == "float32" else 2)
