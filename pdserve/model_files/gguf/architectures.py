"""The architectures of GGUF files that are served, and what each says in keys of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pdserve.model_files.gguf.fields import GgufFields


def _nothing(fields: GgufFields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What `general.architecture` names."""

    called: Callable[[GgufFields], str]  # in config.json
    reads: frozenset[str] = frozenset()  # keys of few architectures, and of this one
    own: Callable[[GgufFields], dict[str, Any]] = _nothing  # fields of config.json
    permutes_heads: bool = False  # rows of q and k: [2, half] is stored as [half, 2]
    truncates_yarn: bool = True  # the bounds of its ramp are whole dimensions
    is_latent: bool = False  # `own` says what sizes heads have
    # What it is instead, if scores of experts have biases.
    with_score_bias: Architecture | None = None


def _llama(fields: GgufFields) -> str:
    if fields.integer("expert_count", 0, minimum=0):
        return "MixtralForCausalLM"
    has_window = fields.integer("attention.sliding_window", 0, minimum=0) > 0
    return "MistralForCausalLM" if has_window else "LlamaForCausalLM"


def _olmo(fields: GgufFields) -> str:
    has_window = fields.integer("attention.sliding_window", 0, minimum=0) > 0
    return "Olmo3ForCausalLM" if has_window else "Olmo2ForCausalLM"


def _gemma(fields: GgufFields, largest: int) -> dict[str, Any]:
    """Of both: files tell the scale of queries by the number of layers, that of the largest."""
    num_heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    scalar = fields.integer("attention.key_length", hidden // num_heads)
    config: dict[str, Any] = {
        "query_pre_attn_scalar": (
            hidden // num_heads if fields.integer("block_count") == largest else scalar
        ),
        "stored_norm_offset": 1.0,
    }
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in fields:
            config[key] = None if fields.raw(key) == 0 else fields.number(key)
    if (pattern := fields.raw("attention.sliding_window_pattern")) is not None:
        config |= _windows(fields, pattern)
    return config


def _windows(fields: GgufFields, pattern: Any) -> dict[str, Any]:
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if one else "full_attention" for one in pattern]
        return {"layer_types": kinds}
    return {"sliding_window_pattern": fields.integer("attention.sliding_window_pattern")}


def _gemma2(fields: GgufFields) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window", 4096)
    return _gemma(fields, largest=46) | {"sliding_window": window}


def _gemma3(fields: GgufFields) -> dict[str, Any]:
    config = _gemma(fields, largest=62)
    if "rope.freq_base_swa" in fields:
        config["rope_local_base_freq"] = fields.number("rope.freq_base_swa")
    return config | {"rope_theta": fields.number("rope.freq_base", 1e6)}


def _phi3(fields: GgufFields) -> dict[str, Any]:
    """Of Phi-4 too, whose window is 0."""
    return {"original_max_position_embeddings": _original_length(fields)}


def _original_length(fields: GgufFields) -> int:
    key = "rope.scaling.original_context_length"
    return fields.integer(key, fields.integer("context_length"))


def _granite(fields: GgufFields) -> dict[str, Any]:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    config = {ours: fields.number(key) for key, ours in keys.items() if fields.raw(key)}
    size = fields.integer("embedding_length") // fields.integer("attention.head_count")
    return {"attention_multiplier": size**-0.5} | config


def _olmo2(fields: GgufFields) -> dict[str, Any]:
    """Of OLMo 3 too, whose layers with a window may have a base of their own."""
    config = {}
    if "rope.freq_base_swa" in fields:
        config["rope_local_base_freq"] = fields.number("rope.freq_base_swa")
    pattern = fields.raw("attention.sliding_window_pattern")
    return config if pattern is None else config | _windows(fields, pattern)


def _gpt_oss(fields: GgufFields) -> dict[str, Any]:
    pattern = fields.raw("attention.sliding_window_pattern")
    return {} if pattern is None else _windows(fields, pattern)


def _cohere2(fields: GgufFields) -> dict[str, Any]:
    """The pattern of windows is not in the file."""
    return {
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
        "logit_scale": fields.number("logit_scale"),
    }


def _qwen2_moe(fields: GgufFields) -> dict[str, Any]:
    width, chosen = fields.integer("feed_forward_length"), fields.integer("expert_used_count")
    shared = fields.integer("expert_shared_feed_forward_length", width)
    inner = fields.integer("expert_feed_forward_length", width // chosen)
    return {
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
    }


def _deepseek2(fields: GgufFields) -> dict[str, Any]:
    config = _deepseek(fields)
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config | {"topk_method": method}


def _deepseek3(fields: GgufFields) -> dict[str, Any]:
    """Files that transformers 5 is the source of do not name the scores."""
    if fields.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise fields.error("expert_gating_func", f"{_SIGMOID} (sigmoid), as scores have biases")
    return _deepseek(fields)


def _deepseek(fields: GgufFields) -> dict[str, Any]:
    """Of both. A file without groups of experts has one."""
    heads, rope = fields.integer("attention.head_count"), fields.integer("rope.dimension_count")
    is_split = "attention.key_length_mla" in fields  # else it has been written before May 2025
    key, value = (f"attention.{which}_length{'_mla' * is_split}" for which in ("key", "value"))
    if (query := fields.integer(key)) <= rope:
        raise fields.error(key, f"more than the {rope} dimensions that are rotated")
    groups = fields.integer("expert_group_count", 1, minimum=0) or 1
    return {
        "num_key_value_heads": heads,  # not that of what is kept: one
        "q_lora_rank": _or_none(fields, "attention.q_lora_rank"),
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": query - rope,
        "v_head_dim": fields.integer(value),
        "stored_split_heads": is_split,
        "intermediate_size": fields.integer("feed_forward_length"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "n_routed_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "n_shared_experts": fields.integer("expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, minimum=0),
        "n_group": groups,
        "topk_group": fields.integer("expert_group_used_count", minimum=1) if groups > 1 else 1,
        "norm_topk_prob": fields.boolean("expert_weights_norm", False),
        "routed_scaling_factor": (
            fields.number("expert_weights_scale") if fields.raw("expert_weights_scale") else 1.0
        ),
    }


def _or_none(fields: GgufFields, key: str) -> int | None:
    return fields.integer(key) if key in fields else None


# Of models of the same converter that have Mamba layers and experts; dense ones have the keys, too.
_OF_GRANITE_4: Final = frozenset(
    {
        "expert_shared_feed_forward_length",
        *(f"ssm.{part}" for part in ("conv_kernel", "state_size", "group_count", "inner_size")),
        "ssm.time_step_rank",
    }
)
_SIGMOID: Final = 2  # of expert_gating_func
_OF_DEEPSEEK: Final = frozenset(
    {
        *(f"attention.{name}" for name in ("q_lora_rank", "kv_lora_rank")),
        *(f"attention.{name}" for name in ("key_length_mla", "value_length_mla")),
        *(f"expert_{name}" for name in ("shared_count", "weights_norm", "weights_scale")),
        *(f"expert_{name}" for name in ("group_count", "group_used_count")),
        "leading_dense_block_count",
        "rope.scaling.yarn_log_multiplier",
    }
)
_OF_GEMMA: Final = frozenset({"final_logit_softcapping", "attention.sliding_window_pattern"})
ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture(_llama, permutes_heads=True),  # Mistral and Mixtral too
    "qwen2": Architecture(lambda _: "Qwen2ForCausalLM"),
    "qwen3": Architecture(lambda _: "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(lambda _: "Qwen3MoeForCausalLM"),
    "qwen2moe": Architecture(
        lambda _: "Qwen2MoeForCausalLM",
        frozenset({"expert_shared_feed_forward_length"}),
        _qwen2_moe,
    ),
    "phi3": Architecture(
        lambda _: "Phi3ForCausalLM", frozenset({"rope.scaling.attn_factor"}), _phi3
    ),
    "granite": Architecture(
        lambda _: "GraniteForCausalLM",
        frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
        | _OF_GRANITE_4,
        _granite,
        permutes_heads=True,
    ),
    "olmo2": Architecture(
        _olmo, frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}), _olmo2
    ),
    "gpt-oss": Architecture(
        lambda _: "GptOssForCausalLM",
        frozenset({"attention.sliding_window_pattern"}),
        _gpt_oss,
        truncates_yarn=False,
    ),
    "deepseek2": Architecture(
        lambda _: "DeepseekV2ForCausalLM",
        _OF_DEEPSEEK,
        _deepseek2,
        is_latent=True,
        with_score_bias=Architecture(
            lambda _: "DeepseekV3ForCausalLM",
            _OF_DEEPSEEK | {"expert_gating_func"},
            _deepseek3,
            is_latent=True,
        ),
    ),
    # Which layers do not rotate is not in the file.
    "smollm3": Architecture(lambda _: "SmolLM3ForCausalLM", permutes_heads=True),
    "glm4": Architecture(lambda _: "Glm4ForCausalLM"),
    "cohere2": Architecture(
        lambda _: "Cohere2ForCausalLM",
        frozenset({"attention.layer_norm_epsilon", "logit_scale"}),
        _cohere2,
    ),
    "gemma2": Architecture(
        lambda _: "Gemma2ForCausalLM", _OF_GEMMA | {"attn_logit_softcapping"}, _gemma2
    ),
    "gemma3": Architecture(
        lambda _: "Gemma3ForCausalLM", _OF_GEMMA | {"rope.freq_base_swa"}, _gemma3
    ),
}
