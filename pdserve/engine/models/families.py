"""What each supported architecture fixes, and what it leaves to config.json. No torch here.

All are pre-norm decoders with RMSNorm, rotary positions, grouped-query attention and a gated SiLU
MLP, or a mixture of such. They differ in biases, in query and key norms, and in which layers use a
sliding window or have experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pdserve.engine.models.expert_config import (
    ExpertConfig,
    mixtral_experts,
    no_experts,
    qwen3_experts,
)
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.rope_config import RopeConfig
from pdserve.shared.errors import ModelError, UnknownArchitecture, UnsupportedRope

Windows = tuple[int | None, ...]  # per layer: number of tokens a query sees; None for all


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm that each layer has."""

    name: str  # as decoders know it
    tensor: str  # in the checkpoint, within its layer and without ".weight"
    is_of_heads: bool = False  # else of the residual stream


_BEFORE_ATTENTION = LayerNorm("attention_norm", "input_layernorm")
_BEFORE_MLP = LayerNorm("mlp_norm", "post_attention_layernorm")
_OF_HEADS = (
    LayerNorm("q_norm", "self_attn.q_norm", is_of_heads=True),
    LayerNorm("k_norm", "self_attn.k_norm", is_of_heads=True),
)
PRE_NORMS = (_BEFORE_ATTENTION, _BEFORE_MLP)
PRE_AND_HEAD_NORMS = (_BEFORE_ATTENTION, *_OF_HEADS, _BEFORE_MLP)


def _no_windows(fields: JsonFields, num_layers: int) -> Windows:
    if "sliding_window" in fields:
        raise ModelError(
            f"{fields.where}: sliding_window is {fields.raw('sliding_window')!r}, which this "
            "architecture does not have"
        )
    return (None,) * num_layers


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. A bias of None means that config.json decides."""

    model_type: str
    default_max_positions: int
    # (config.json, num_layers) -> windows
    windows: Callable[[JsonFields, int], Windows] = _no_windows
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    norms: tuple[LayerNorm, ...] = PRE_NORMS  # in the order of packed files
    default_head_dim: int | None = None  # None: hidden_size / num_heads
    default_theta: float = 10_000.0  # of rotary positions
    default_norm_eps: float = 1e-6
    experts: Callable[[JsonFields, int], ExpertConfig | None] = no_experts  # as windows
    rotated_share: float | None = None  # of a head, if config.json does not say; None: always all
    rotates_neighbours: bool = False  # in checkpoints, pairs of rotated dimensions are neighbours
    has_fused_qkv: bool = False  # checkpoints have one tensor of the three, qkv_proj
    has_fused_gate_up: bool = False  # likewise gate_up_proj


def _same_window(fields: JsonFields, num_layers: int) -> Windows:
    # Mistral: absent means the default of the architecture, null means none.
    window: int | None = 4096
    if fields.has_key("sliding_window"):
        window = fields.integer("sliding_window") if "sliding_window" in fields else None
    layer_types = set(fields.texts("layer_types") or [])
    if layer_types - {"full_attention" if window is None else "sliding_attention"}:
        raise ModelError(
            f"{fields.where}: layer_types contradicts sliding_window, which holds for all layers "
            "of this architecture"
        )
    return (window,) * num_layers


def _window_if_set(fields: JsonFields, num_layers: int) -> Windows:
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    return (window,) * num_layers


def _window_if_used(fields: JsonFields, num_layers: int) -> Windows:
    return (_used_window(fields),) * num_layers


def _used_window(fields: JsonFields) -> int | None:
    is_null = fields.has_key("sliding_window") and "sliding_window" not in fields
    if is_null or not fields.boolean("use_sliding_window", False):
        return None
    return fields.integer("sliding_window", 4096)


def _window_per_layer(fields: JsonFields, num_layers: int) -> Windows:
    window = _used_window(fields)
    layer_types = fields.texts("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers}, one for each layer")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or (window is None and "sliding_attention" in layer_types):
        raise fields.error(
            "layer_types",
            "of full_attention, and with use_sliding_window and sliding_window sliding_attention",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", 2048, qkv_bias=None, o_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family("mistral", 131_072, _same_window),
    "Qwen2ForCausalLM": Family("qwen2", 32_768, _window_per_layer, qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        32_768,
        _window_per_layer,
        qkv_bias=None,
        o_bias=None,
        norms=PRE_AND_HEAD_NORMS,
        default_head_dim=128,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        131_072,
        _window_if_set,
        default_theta=1e6,
        default_norm_eps=1e-5,
        experts=mixtral_experts,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        4096,
        _window_if_set,
        default_norm_eps=1e-5,
        rotated_share=1.0,
        has_fused_qkv=True,
        has_fused_gate_up=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        32_768,
        _window_if_used,
        qkv_bias=None,
        o_bias=None,
        norms=PRE_AND_HEAD_NORMS,
        experts=qwen3_experts,
    ),
}

# Fields with which other architectures, or variants of these, change the arithmetic, and the values
# that change nothing. With any other value, ignoring the field would give wrong results.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "rotary_pct": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "scale_emb": (1.0,),
    "scale_depth": (1.0,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "attn_temperature_tuning": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_mrope": (False,),
    "alibi": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "bias": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "n_routed_experts": (0,),
    "vision_config": (),
    "audio_config": (),
    "pruned_heads": ({},),
}


def find_family(fields: JsonFields) -> tuple[str, Family]:
    """Return the architecture that config.json names, and its family.

    Raises:
        UnknownArchitecture: it names none, or none that is supported; lists the supported ones.
    """
    names = fields.texts("architectures") or []
    if not names and "model_type" in fields:
        model_type = fields.text("model_type")
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    found = ", ".join(names) or "no architecture"
    raise UnknownArchitecture(f"{fields.where} names {found}; supported are {', '.join(FAMILIES)}")


def rotation(family: Family, rope: RopeConfig, fields: JsonFields, head_dim: int) -> RopeConfig:
    """Which dimensions of a head are rotated. Raises UnsupportedRope: the family has none such."""
    share = rope.rotated_share or family.rotated_share or 1.0
    rope = replace(rope, rotated_share=share, is_interleaved=family.rotates_neighbours)
    if (
        share > 1
        or (share != 1 and family.rotated_share is None)
        or rope.rotated_dims(head_dim) % 2
    ):
        raise UnsupportedRope(
            f"{fields.where}: partial_rotary_factor {share:g} of a head of {head_dim} is not "
            "supported for this architecture"
        )
    return rope


def resolve_bias(fields: JsonFields, key: str, fixed: bool | None) -> bool:
    """Whether layers have a bias, according to the family, or to the field if it leaves it open.

    Raises:
        ModelError: the field contradicts what the family fixes.
    """
    if fixed is None:
        return fields.boolean(key, False)
    if fields.boolean(key, fixed) != fixed:
        raise fields.error(key, f"{str(fixed).lower()} for this architecture")
    return fixed


def refuse_foreign_arithmetic(fields: JsonFields) -> None:
    """Raise ModelError for a field that asks for arithmetic that the decoder does not have."""
    for key, neutral in _NEUTRAL.items():
        value = fields.raw(key)
        if value is not None and value not in neutral:
            raise ModelError(f"{fields.where}: {key} = {_shortened(value)} is not supported")
    if "AutoModelForCausalLM" in fields.nested("auto_map"):
        raise ModelError(f"{fields.where}: auto_map asks for code of the model's own; none is run")
    activation = fields.text("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise ModelError(
            f"{fields.where}: hidden_act {activation!r} is not supported; supported is 'silu'"
        )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
