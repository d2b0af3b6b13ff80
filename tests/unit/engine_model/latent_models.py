"""Models with latent attention (DeepSeek V2, V3) of odd sizes, and what may be left out of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pdserve.engine.models.config import ModelConfig

Mutant = Callable[[ModelConfig], ModelConfig]


LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "v3": ("deepseek_v3", {}),
    "v3 by halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3 of one head": (
        "deepseek_v3",
        {"num_attention_heads": 1, "num_key_value_heads": 1, "kv_lora_rank": 70, "seed": 1},
    ),
    "v3 of one group": (  # as Kimi K2
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True},
    ),
}


def rotating(**changes: Any) -> Mutant:
    return lambda config: replace(
        config, ropes=tuple(rope and replace(rope, **changes) for rope in config.ropes)
    )


def without_mscale(config: ModelConfig) -> ModelConfig:
    assert config.latent is not None
    plain = replace(config.arithmetic, attention_scale=config.latent.query_dim**-0.5)
    return replace(config, arithmetic=plain)


# Of a case: what is special of it, left out or done otherwise.
LATENT_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "no mscale on scores": ("v3", without_mscale),
    "no mscale on angles": ("v3", rotating(attention_factor=1.0)),
    "halves rotated, not neighbours": ("v3", rotating(is_interleaved=False)),
}
