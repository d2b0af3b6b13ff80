"""What each supported architecture fixes, and what it leaves to config.json. No torch here.

All are decoders with RMSNorm, rotary positions, grouped-query or latent attention and a gated MLP,
or a mixture of such. They differ in biases, in norms, in which layers use a sliding window, have
experts or rotate how, and in some numbers (`arithmetic.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.engine.models.arithmetic import Activation, Arithmetic, Scalar
from pdserve.engine.models.expert_config import (
    ExpertConfig,
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    mixtral_experts,
    no_experts,
    qwen2_experts,
    qwen3_experts,
    qwen3_next_experts,
)
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.latent import LatentShape, deepseek_latent, no_latent
from pdserve.engine.models.layer_ropes import (
    RopeRule,
    rope_but_every,
    rope_by_window,
    rope_if_asked,
    rope_if_window,
    same_rope,
)
from pdserve.engine.models.recurrent import RecurrentShape, no_recurrent, qwen3_next_recurrent
from pdserve.engine.models.rope_config import RopeConfig
from pdserve.engine.models.windows import (
    WindowRule,
    attention_only,
    no_windows,
    same_window,
    window_but_every,
    window_if_set,
    window_if_used,
    window_of_types,
    window_per_layer,
)
from pdserve.shared.errors import UnknownArchitecture, UnsupportedRope


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm that each layer has."""

    name: str  # as decoders know it
    tensor: str  # in the checkpoint, within its layer and without ".weight"
    is_of_heads: bool = False  # else of the residual stream


@dataclass(frozen=True, slots=True)
class MlpTensors:
    """What checkpoints call those of an MLP, within its layer."""

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_up: str = ""  # one tensor that has both; "": there are two


PLAIN_MLP = MlpTensors()
_BEFORE_ATTENTION = LayerNorm("attention_norm", "input_layernorm")
_BEFORE_MLP = LayerNorm("mlp_norm", "post_attention_layernorm")
_OF_HEADS = (
    LayerNorm("q_norm", "self_attn.q_norm", is_of_heads=True),
    LayerNorm("k_norm", "self_attn.k_norm", is_of_heads=True),
)
PRE_NORMS = (_BEFORE_ATTENTION, _BEFORE_MLP)
PRE_AND_HEAD_NORMS = (_BEFORE_ATTENTION, *_OF_HEADS, _BEFORE_MLP)
_SANDWICHED = (  # each sublayer between two
    _BEFORE_ATTENTION,
    LayerNorm("after_attention_norm", "post_attention_layernorm"),
    LayerNorm("mlp_norm", "pre_feedforward_layernorm"),
    LayerNorm("after_mlp_norm", "post_feedforward_layernorm"),
)

_AFTER = (  # each sublayer behind one alone
    *_OF_HEADS,
    LayerNorm("after_attention_norm", "post_attention_layernorm"),
    LayerNorm("after_mlp_norm", "post_feedforward_layernorm"),
)
_GLM_4_NORMS = (
    _BEFORE_ATTENTION,
    LayerNorm("after_attention_norm", "post_self_attn_layernorm"),
    _BEFORE_MLP,
    LayerNorm("after_mlp_norm", "post_mlp_layernorm"),
)

_GRANITE = (
    Scalar("embedding_scale", "embedding_multiplier", 1.0),
    Scalar("attention_scale", "attention_multiplier", 1.0),
    Scalar("residual_scale", "residual_multiplier", 1.0),
    Scalar("logit_scale", "logits_scaling", 1.0, lambda scaling: 1 / scaling),
)

# Gemma's.
_SCALARS = (
    Scalar("embedding_scale", "hidden_size", made=math.sqrt),
    Scalar("attention_scale", "query_pre_attn_scalar", 256.0, lambda size: size**-0.5),
)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. A bias of None means that config.json decides."""

    model_type: str
    default_max_positions: int
    windows: WindowRule = no_windows
    qkv_bias: bool | None = False
    biases_qkv: bool = False  # if config.json does not say
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
    mlp: MlpTensors = PLAIN_MLP
    inner_key: str = "intermediate_size"
    ropes: RopeRule = same_rope
    activation: Activation = Activation.SILU
    scalars: tuple[Scalar, ...] = ()
    norm_offset: float = 0.0  # added to the weights of all norms
    ties_embeddings: bool = False  # if config.json does not say
    norm_eps_key: str = "rms_norm_eps"
    has_sinks: bool = False
    centres_norms: bool = False  # as Arithmetic has these
    norms_heads_together: bool = False
    is_parallel: bool = False
    latent: Callable[[JsonFields], LatentShape | None] = no_latent
    recurrent: Callable[[JsonFields, int], RecurrentShape | None] = no_recurrent  # as windows
    gates_attention: bool = False  # by numbers that checkpoints have behind each head's query
    also_reads: frozenset[str] = frozenset()  # fields of config.json, by its rules

    @property
    def reads(self) -> frozenset[str]:
        """Fields of config.json that are of few families, and of this one."""
        return self.also_reads.union(scalar.key for scalar in self.scalars)

    def arithmetic(self, fields: JsonFields) -> Arithmetic:
        """Raises ModelError: a field is no number above 0."""
        read = (number for scalar in self.scalars for number in scalar.read(fields).items())
        return Arithmetic(
            self.activation,
            **dict(read),
            centres_norms=self.centres_norms,
            norms_heads_together=self.norms_heads_together,
            is_parallel=self.is_parallel,
        )


_GLM = Family(
    "glm",
    131_072,
    qkv_bias=None,
    biases_qkv=True,
    default_head_dim=128,
    default_norm_eps=1.5625e-7,
    rotated_share=0.5,
    rotates_neighbours=True,
    mlp=MlpTensors(gate_up="mlp.gate_up_proj"),
)

_DEEPSEEK_V2 = Family(
    "deepseek_v2",
    2048,
    qkv_bias=None,
    o_bias=None,
    rotates_neighbours=True,
    experts=deepseek_v2_experts,
    latent=deepseek_latent,
    # What auto_map names is what is computed here.
    also_reads=frozenset({"n_routed_experts", "auto_map"}),
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", 2048, qkv_bias=None, o_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family("mistral", 131_072, same_window),
    "Qwen2ForCausalLM": Family("qwen2", 32_768, window_per_layer, qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        32_768,
        window_per_layer,
        qkv_bias=None,
        o_bias=None,
        norms=PRE_AND_HEAD_NORMS,
        default_head_dim=128,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        131_072,
        window_if_set,
        default_theta=1e6,
        default_norm_eps=1e-5,
        experts=mixtral_experts,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        4096,
        window_if_set,
        default_norm_eps=1e-5,
        rotated_share=1.0,
        has_fused_qkv=True,
        mlp=MlpTensors(gate_up="mlp.gate_up_proj"),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", 32_768, window_of_types, qkv_bias=True, experts=qwen2_experts
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        32_768,
        window_if_used,
        qkv_bias=None,
        o_bias=None,
        norms=PRE_AND_HEAD_NORMS,
        experts=qwen3_experts,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        32_768,
        qkv_bias=None,
        o_bias=None,
        norms=PRE_AND_HEAD_NORMS,
        default_head_dim=256,
        experts=qwen3_next_experts,
        rotated_share=0.25,
        norm_offset=1.0,
        recurrent=qwen3_next_recurrent,
        gates_attention=True,
    ),
    "GraniteForCausalLM": Family(
        "granite", 2048, qkv_bias=None, o_bias=None, mlp_bias=None, scalars=_GRANITE
    ),
    "GraniteMoeHybridForCausalLM": Family(  # Granite 4, without Mamba and experts
        "granitemoehybrid",
        2048,
        attention_only,
        qkv_bias=None,
        o_bias=None,
        mlp=MlpTensors(down="shared_mlp.output_linear", gate_up="shared_mlp.input_linear"),
        inner_key="shared_intermediate_size",
        ropes=rope_if_asked,
        scalars=_GRANITE,
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        2048,
        qkv_bias=None,
        o_bias=None,
        norms=_AFTER,
        default_norm_eps=1e-5,
        norms_heads_together=True,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        2048,
        window_but_every(4),
        qkv_bias=None,
        o_bias=None,
        norms=_AFTER,
        default_theta=500_000.0,
        default_norm_eps=1e-5,
        ropes=rope_by_window(),
        norms_heads_together=True,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        32_768,
        window_of_types,
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        default_theta=2e6,
        ropes=rope_but_every(4),
        ties_embeddings=True,
        also_reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, model_type="glm4", norms=_GLM_4_NORMS),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        8192,
        window_but_every(4),
        qkv_bias=None,
        o_bias=None,
        norms=(_BEFORE_ATTENTION,),
        default_norm_eps=1e-5,
        rotates_neighbours=True,
        ropes=rope_if_window,
        scalars=(Scalar("logit_scale", "logit_scale", 0.0625),),
        ties_embeddings=True,
        norm_eps_key="layer_norm_eps",
        centres_norms=True,
        is_parallel=True,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        131_072,
        window_but_every(2, default=128),
        qkv_bias=None,
        biases_qkv=True,
        o_bias=None,
        default_head_dim=64,
        default_theta=150_000.0,
        default_norm_eps=1e-5,
        experts=gpt_oss_experts,
        activation=Activation.CLAMPED,
        has_sinks=True,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        8192,
        window_but_every(2),
        qkv_bias=None,
        o_bias=None,
        norms=_SANDWICHED,
        default_head_dim=256,
        activation=Activation.GELU_TANH,
        scalars=(
            *_SCALARS,
            Scalar("attention_cap", "attn_logit_softcapping", 50.0),
            Scalar("logit_cap", "final_logit_softcapping", 30.0),
        ),
        norm_offset=1.0,
        ties_embeddings=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        131_072,
        window_but_every(6),
        qkv_bias=None,
        o_bias=None,
        norms=(*_SANDWICHED[:1], *_OF_HEADS, *_SANDWICHED[1:]),
        default_head_dim=256,
        default_theta=1e6,
        ropes=rope_by_window(10_000.0),
        activation=Activation.GELU_TANH,
        scalars=(*_SCALARS, Scalar("logit_cap", "final_logit_softcapping")),
        norm_offset=1.0,
        ties_embeddings=True,
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": replace(  # Kimi K2, too
        _DEEPSEEK_V2,
        model_type="deepseek_v3",
        default_max_positions=4096,
        experts=deepseek_v3_experts,
        also_reads=_DEEPSEEK_V2.also_reads | {"rope_interleave", "num_nextn_predict_layers"},
    ),
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
    raise UnknownArchitecture(
        f"{fields.where} names {found}; supported are {', '.join(FAMILIES)}: take a model of these"
    )


def rotation(family: Family, rope: RopeConfig, fields: JsonFields, head_dim: int) -> RopeConfig:
    """Which dimensions of a head are rotated. Raises UnsupportedRope: the family has none such."""
    share = rope.rotated_share or family.rotated_share or 1.0
    are_neighbours = family.rotates_neighbours
    if "rope_interleave" in family.reads:
        are_neighbours = fields.boolean("rope_interleave", are_neighbours)
    rope = replace(rope, rotated_share=share, is_interleaved=are_neighbours)
    if (
        share > 1
        or (share != 1 and family.rotated_share is None)
        or rope.rotated_dims(head_dim) % 2
    ):
        raise UnsupportedRope(
            f"{fields.where}: partial_rotary_factor {share:g} of a head of {head_dim} is not "
            "supported for this architecture"
        )
    if rope.divisors and len(rope.divisors) != rope.rotated_dims(head_dim) // 2:
        raise UnsupportedRope(
            f"{fields.where}: {len(rope.divisors)} factors of frequencies for "
            f"{rope.rotated_dims(head_dim)} rotated dimensions: a pair has one"
        )
    return rope


def resolve_bias(fields: JsonFields, key: str, fixed: bool | None, default: bool = False) -> bool:
    """Whether layers have a bias, according to the family, or to the field if it leaves it open.

    Raises:
        ModelError: the field contradicts what the family fixes.
    """
    if fixed is None:
        return fields.boolean(key, default)
    if fields.boolean(key, fixed) != fixed:
        raise fields.error(key, f"{str(fixed).lower()} for this architecture")
    return fixed
