"""Shapes of untrained models: fields of config.json, by name.

`50m` is for comparing ways of serving: the smallest model whose weights (100 MB) are far too large
for a cache, since its 4k prompts must be frequent enough to be counted. Two cores keep part of
`25m` in their caches, so that a node with both decodes up to three times as fast as one with one
core, unlike any model worth serving. `demo-14m` is a little larger than the bundled model. `160m`
and `0.6b` are for measuring steps and servers: 128 and 596 million weights in linear layers,
including the output. The other shapes differ from 160m in how many query heads share a KV head.
`8b`, `70b` and `405b` are for GPUs. Where the vocabulary is larger than the tokenizer's, the extra
rows are never sampled.

`moe-160m` multiplies a token by as many weights as 160m, which it chooses from four times as many:
it is for measuring steps. `mla-160m` has latent attention, whose KV is 0.16 of that of 160m: also
for steps. So is `hybrid-160m`, of whose layers three of four have a state instead of KV. `8x7b` and
`30b-a3b` are larger mixtures of experts, for GPUs.
"""

from __future__ import annotations

from typing import Any, Final

Shape = dict[str, Any]  # fields of config.json

_DEMO: Final[Shape] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_25M: Final[Shape] = _DEMO | {
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 6,
    "num_attention_heads": 10,
}
_50M: Final[Shape] = _DEMO | {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
}
_160M: Final[Shape] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_06B: Final[Shape] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
}

_8B: Final[Shape] = {  # Llama-3.1-8B
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
_70B: Final[Shape] = _8B | {  # Llama-3.1-70B
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}

_405B: Final[Shape] = _8B | {  # Llama-3.1-405B
    "hidden_size": 16_384,
    "intermediate_size": 53_248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}

_MOE_160M: Final[Shape] = _160M | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
_MLA_160M: Final[Shape] = _160M | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 12,
    "head_dim": 16,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 64,
    "first_k_dense_replace": 12,  # no layer has experts
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_HYBRID_160M: Final[Shape] = _160M | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 0,
}
_8X7B: Final[Shape] = _8B | {  # Mixtral-8x7B
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "max_position_embeddings": 32_768,
}
_30B_A3B: Final[Shape] = _06B | {  # Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

SHAPES: Final[dict[str, Shape]] = {
    "demo-14m": _DEMO,
    "25m": _25M,
    "50m": _50M,
    "160m": _160M,
    "160m-1-to-1": _160M | {"num_key_value_heads": 12},
    "160m-8-to-1": _160M | {"num_attention_heads": 16, "num_key_value_heads": 2},
    "0.6b": _06B,
    "8b": _8B,
    "70b": _70B,
    "405b": _405B,
    "70b-one-layer": _70B | {"num_hidden_layers": 1},
    "moe-160m": _MOE_160M,
    "mla-160m": _MLA_160M,
    "hybrid-160m": _HYBRID_160M,
    "8x7b": _8X7B,
    "30b-a3b": _30B_A3B,
}
