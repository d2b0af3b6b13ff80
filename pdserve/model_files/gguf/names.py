"""What GGUF calls the tensors of a decoder, for its reader and for the writer of benchmarks.

Names on our side are those of Hugging Face checkpoints. GGUF has all experts of a layer in one
tensor for each purpose, [experts, rows, columns].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

ROPE_DIVISORS: Final = "rope_freqs.weight"
ROPE_FACTORS: Final = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
ONE_ROW: Final = "ffn_gate_inp_shexp"  # a matrix that files may have as a vector
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
SCORE_BIAS: Final = "exp_probs_b.bias"  # in layers: of experts

_ENDS: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_OF_LAYERS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
# Vectors that have no module of their own.
_ALONE: Final = {"sinks": "attn_sinks.weight", "e_score_correction_bias": SCORE_BIAS}
OF_HEADS: Final = frozenset({"attn_k_b", "attn_v_b"})  # [heads, rows, columns]
# Where an architecture calls something else by a name of the others.
_SANDWICHED: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_4: Final = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GPT_OSS: Final = {"post_attention_layernorm": "post_attention_norm"}
_OF_ARCHITECTURES: Final = {
    "gpt-oss": _GPT_OSS,
    "gemma2": _SANDWICHED,
    "gemma3": _SANDWICHED,
    "olmo2": _SANDWICHED,
    "glm4": _GLM_4,
}
_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_OF_EXPERTS: Final = {
    "w1": "ffn_gate",
    "w2": "ffn_down",
    "w3": "ffn_up",
    "gate_proj": "ffn_gate",
    "down_proj": "ffn_down",
    "up_proj": "ffn_up",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in a GGUF file."""

    name: str
    expert: int | None = None  # of the tensor `name`; None: it is the whole tensor

    @property
    def own_name(self) -> str:
        """The tensor of one expert alone, as files before 2024 have them."""
        return self.name.replace("_exps.", f".{self.expert}.")

    @property
    def part(self) -> str:
        """What it is, without the layer: attn_q, ffn_down_exps."""
        return self.name.split(".")[-2]


def place_of(name: str, architecture: str = "llama") -> Place:
    """Return where a tensor of a checkpoint is. Raises KeyError: GGUF has none such here."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return Place(f"{_ENDS[stem]}.{kind}")
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    if kind in _ALONE:
        return Place(f"blk.{number}.{_ALONE[kind]}")
    if (expert := _EXPERT.fullmatch(part)) is not None:
        return Place(f"blk.{number}.{_OF_EXPERTS[expert[2]]}_exps.{kind}", int(expert[1]))
    parts = _OF_LAYERS | _OF_ARCHITECTURES.get(architecture, {})
    return Place(f"blk.{number}.{parts[part]}.{kind}")
