"""Logits and greedy tokens of every family and rope variant, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.models.arithmetic import Activation
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.models.windows import Windows
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import (
    edit_config,
    make_checkpoint,
    to_transformers_4_style,
    with_plain_tensors,
)
from tests.long_requests import LONG_ROPE
from tests.matrix import matrix
from tests.unit.engine_model.harness import EACH_DECODER, DecoderKind, Node, make_prompt
from tests.unit.engine_model.reference import assert_matches

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with head_dim 64": ("llama", {"head_dim": 64}),
    "llama with head_dim 128": ("llama", {"head_dim": 128}),
    "mistral": ("mistral", {}),
    "mistral with window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with head_dim 128": ("qwen3", {"head_dim": 128}),
    "qwen3 with bias": ("qwen3", {"attention_bias": True}),
    "qwen3 with windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral with window": ("mixtral", {"sliding_window": 24}),
    "phi3": ("phi3", {}),
    "phi3 with window": ("phi3", {"sliding_window": 24}),
    "phi3 partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    "phi3 with longrope": ("phi3", LONG_ROPE),
    "granite": ("granite", {}),
    "granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite4": ("granite4", {"seed": 1}),
    "granite4 without rope": ("granite4", {"position_embedding_type": None}),
    "olmo2": ("olmo2", {}),
    "olmo2 with bias": ("olmo2", {"attention_bias": True, "seed": 3}),
    "olmo3": ("olmo3", {"seed": 1}),
    "olmo3 with yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
            "seed": 1,
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3 by an interval": (
        "smollm3",
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "num_hidden_layers": 3},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "cohere2": ("cohere2", {}),
    "cohere2 with bias": ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss without grouping": (
        "gpt_oss",
        {"num_key_value_heads": 4, "hidden_size": 60},
    ),
    "qwen2 moe": ("qwen2_moe", {}),
    "qwen2 moe with MLPs": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3", {}),
    "gemma3 stretched": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        },
    ),
    "qwen3 moe": ("qwen3_moe", {}),
    "qwen3 moe with unnormalised weights": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3 moe with MLPs": (
        "qwen3_moe",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
}

# Of each family the case that has most of it.
TELLING = {
    "llama with biases",
    "mistral with window",
    "qwen2 with windows",
    "qwen3 with windows",
    "mixtral with window",
    "phi3 with longrope",
    "phi3 partial",
    "granite with biases",
    "granite4",
    "olmo2",
    "olmo3 with yarn",
    "smollm3",
    "glm",
    "glm4",
    "cohere2",
    "gpt-oss",
    "qwen2 moe with MLPs",
    "gemma2",
    "gemma3 stretched",
    "qwen3 moe with MLPs",
}

Mutant = Callable[[ModelConfig], ModelConfig]


def with_rope(**changes: Any) -> Mutant:
    def change(config: ModelConfig) -> ModelConfig:
        ropes = tuple(rope and replace(rope, **changes) for rope in config.ropes)
        return replace(config, ropes=ropes)

    return change


def of_layers(layers: str, **changes: Any) -> Mutant:
    """With other ropes in layers with a window ("local"), or in those without ("global")."""

    def change(config: ModelConfig) -> ModelConfig:
        ropes = tuple(
            rope
            and (replace(rope, **changes) if (window is None) == (layers == "global") else rope)
            for rope, window in zip(config.ropes, config.sliding_windows, strict=True)
        )
        return replace(config, ropes=ropes)

    return change


def computing(**changes: Any) -> Mutant:
    return lambda config: replace(config, arithmetic=replace(config.arithmetic, **changes))


def rotating_everywhere(config: ModelConfig) -> ModelConfig:
    (rope,) = {rope for rope in config.ropes if rope}
    return replace(config, ropes=(rope,) * config.num_layers)


def with_windows(change: Callable[[Windows], Windows]) -> Mutant:
    return lambda config: replace(config, sliding_windows=change(config.sliding_windows))


def swapping_norms(one: str, other: str) -> Mutant:
    def change(config: ModelConfig) -> ModelConfig:
        tensors = {norm.name: norm.tensor for norm in config.norms}
        tensors |= {one: tensors[other], other: tensors[one]}
        norms = tuple(replace(norm, tensor=tensors[norm.name]) for norm in config.norms)
        return replace(config, norms=norms)

    return change


# Of a case: what is special of it, left out or done otherwise.
MUTANTS: dict[str, tuple[str, Mutant]] = {
    "rotates all of a head": ("phi3 partial", with_rope(rotated_share=1.0)),
    "rotates half of a head": ("phi3 partial", with_rope(rotated_share=0.5)),
    "rotates neighbours": ("phi3 partial", with_rope(is_interleaved=True)),
    "window of one more": ("gemma3", with_windows(lambda of: tuple(w and w + 1 for w in of))),
    "windows of other layers": ("gemma2", with_windows(lambda of: of[1:] + of[:1])),
    "no windows": ("gemma3", with_windows(lambda of: (None,) * len(of))),
    "local base of global layers": ("gemma3", of_layers("local", theta=1e6)),
    "global base of local layers": ("gemma3", of_layers("global", theta=10_000.0)),
    "global layers not stretched": ("gemma3 stretched", of_layers("global", factor=1.0)),
    "no rotation": ("gemma3", lambda config: replace(config, ropes=(None,) * config.num_layers)),
    "plain attention scale": ("gemma3", computing(attention_scale=None)),
    "scores without cap": ("gemma2", computing(attention_cap=None)),
    "logits without cap": ("gemma2", computing(logit_cap=None)),
    "embedding not scaled": ("gemma3", computing(embedding_scale=1.0)),
    "another activation": ("gemma2", computing(activation=Activation.SILU)),
    "norms without 1": ("gemma3", lambda config: replace(config, norm_offset=0.0)),
    "norms around attention": ("gemma2", swapping_norms("attention_norm", "after_attention_norm")),
    "norms around the MLP": ("gemma2", swapping_norms("mlp_norm", "after_mlp_norm")),
    "norms of heads": ("gemma3", swapping_norms("q_norm", "k_norm")),
    "factors of long sequences": ("phi3 with longrope", with_rope(divisors=(1, 2, 4, 8, 12, 16))),
    "attention not scaled": ("phi3 with longrope", with_rope(attention_factor=1.0)),
    "no residual multiplier": ("granite", computing(residual_scale=1.0)),
    "no embedding multiplier": ("granite", computing(embedding_scale=1.0)),
    "no attention multiplier": ("granite", computing(attention_scale=None)),
    "no logits scaling": ("granite", computing(logit_scale=1.0)),
    "rope in a layer without": ("smollm3", rotating_everywhere),
    "rope in a global layer": ("cohere2", rotating_everywhere),
    "norms that do not centre": ("cohere2", computing(centres_norms=False)),
    "halves rotated, not neighbours": ("glm4", with_rope(is_interleaved=False)),
    "all of a head rotated": ("glm", with_rope(rotated_share=1.0)),
    "norms after attention and MLP": (
        "olmo2",
        swapping_norms("after_attention_norm", "after_mlp_norm"),
    ),
    "ramp of whole dimensions": ("gpt-oss", with_rope(truncate=True)),
    "experts without clamps": ("gpt-oss", computing(activation=Activation.SILU)),
    "norms around both": ("glm4", swapping_norms("attention_norm", "after_attention_norm")),
}
# Of a case: a tensor whose numbers are all alike in the mutant, and what they are.
PLAIN: dict[str, tuple[str, str, float]] = {
    "shared expert that is not weighed": ("qwen2 moe", "shared_expert_gate", 0.0),
    "no sinks": ("gpt-oss", "sinks", -1e4),
    "no bias of the router": ("gpt-oss", "router.bias", 0.0),
    "no bias of what experts take": ("gpt-oss", "gate_up_proj_bias", 0.0),
    "no bias of what experts make": ("gpt-oss", "down_proj_bias", 0.0),
    "no bias of the output": ("gpt-oss", "o_proj.bias", 0.0),
    "no shared expert": ("qwen2 moe", "shared_expert.down_proj", 0.0),
}

ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


@EACH_DECODER
@pytest.mark.parametrize("case", matrix(CASES, TELLING))
def test_family_matches_transformers(
    case: str, kind: DecoderKind, checkpoint_of: Callable[..., Path]
) -> None:
    family, overrides = CASES[case]
    assert_matches(checkpoint_of(family, **overrides), kind)


@pytest.mark.parametrize("mutant", matrix(MUTANTS, 8))
def test_what_is_special_of_a_family_matters(
    mutant: str, kind: DecoderKind, checkpoint_of: Callable[..., Path]
) -> None:
    """Else the tests above would not tell whether it is there."""
    case, change = MUTANTS[mutant]
    family, overrides = CASES[case]
    path = checkpoint_of(family, **overrides)
    assert_differ(Node.load(path, kind), Node.load(path, kind, change=change))


@pytest.mark.parametrize("mutant", matrix(PLAIN, 2))
def test_what_a_family_has_of_tensors_matters(
    mutant: str, kind: DecoderKind, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Likewise."""
    case, part, number = PLAIN[mutant]
    family, overrides = CASES[case]
    path = checkpoint_of(family, **overrides)
    changed = with_plain_tensors(path, tmp_path / "changed", part, number)
    assert_differ(Node.load(path, kind), Node.load(changed, kind))


def assert_differ(right: Node, wrong: Node) -> None:
    prompt = make_prompt(60)
    difference = (right.logits(prompt) - wrong.logits(prompt)).abs()
    assert difference.mean() > 1e-3, "50 times what a match may be off"


@pytest.mark.parametrize("style", matrix([4, 5], 1))
@pytest.mark.parametrize("rope", matrix(ROPES, {"llama3", "yarn with mscale", "dynamic"}))
def test_rope_matches_transformers(
    rope: str, style: int, kind: DecoderKind, tmp_path: Path
) -> None:
    make_checkpoint(
        tmp_path, "llama", rope_parameters=dict(ROPES[rope]), max_position_embeddings=256
    )
    if style == 4:
        to_transformers_4_style(tmp_path)
    assert_matches(tmp_path, kind)


@pytest.mark.parametrize("family", ["phi3", "granite", "olmo2", "smollm3", "glm4", "qwen2_moe"])
def test_a_config_of_transformers_4_says_the_same(family: str, tmp_path: Path) -> None:
    """There, rope_theta, partial_rotary_factor and torch_dtype are beside the other fields."""
    make_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    share = config["rope_parameters"].get("partial_rotary_factor")
    five = load_model_config(resolve_checkpoint(str(tmp_path)))
    to_transformers_4_style(tmp_path)
    edit_config(
        tmp_path,
        dtype=None,
        torch_dtype=config["dtype"],
        layer_types=None,
        partial_rotary_factor=share,
    )
    assert load_model_config(resolve_checkpoint(str(tmp_path))) == five


def test_sharded_files_match_transformers(kind: DecoderKind, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="100KB", num_hidden_layers=3)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_matches(tmp_path, kind)
