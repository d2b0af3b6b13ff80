"""Frequencies of every rope variant, bit by bit against transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.rope_config import RopeConfig, parse_rope
from pdserve.engine.rope import Rope, inverse_frequencies
from pdserve.shared.errors import ModelError, UnsupportedRope

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "llama3", "factor": 32.0, **LLAMA3, "original_max_position_embeddings": 700},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 64, "beta_slow": 0.5, "truncate": False},
    {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32, "beta_slow": 32},
]


def parse(rope: dict[str, Any] | None, max_positions: int = 131_072, **fields: Any) -> RopeConfig:
    return parse_rope(JsonFields({"rope_parameters": rope, **fields}, "config.json"), max_positions)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_frequencies_are_those_of_transformers(variant: dict[str, Any], theta: float) -> None:
    params = {"rope_theta": theta, **variant}
    config = LlamaConfig(head_dim=96, max_position_embeddings=131_072, rope_parameters=dict(params))
    expected, scale = ROPE_INIT_FUNCTIONS[variant["rope_type"]](config)
    parsed = parse(params)
    torch.testing.assert_close(inverse_frequencies(parsed, 96), expected, rtol=0, atol=0)
    assert parsed.attention_factor == scale


def test_cosines_are_computed_in_float32() -> None:
    config = LlamaConfig(head_dim=64, max_position_embeddings=131_072)
    positions = torch.tensor([0, 1, 77, 4096, 131_071])
    reference = LlamaRotaryEmbedding(config)
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = reference(torch.zeros(1, dtype=dtype), positions[None])
        rope = Rope(parse({"rope_type": "default"}), 64, torch.device("cpu"))
        our_cos, our_sin = rope.cos_sin(positions, dtype)
        assert torch.equal(our_cos[:, 0], cos[0, :, :32])
        assert torch.equal(our_sin[:, 0], sin[0, :, :32])


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_is_that_of_transformers_for_both_kinds_of_requests(name: str) -> None:
    """Older checkpoints of Phi-3 call it otherwise."""
    factors = {"short_factor": [1.0, 1.5, 2.5, 4.0], "long_factor": [2.0, 4.0, 6.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=8,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters=dict(rope),
    )
    parsed = parse(rope | {"rope_type": name}, original_max_position_embeddings=4096)
    assert (parsed.short_len, parsed.max_model_len) == (4096, 131_072)
    found = Rope(parsed, 8, torch.device("cpu")).inverse_frequencies
    for kind, length in enumerate((4096, 4097)):
        expected, scale = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
        torch.testing.assert_close(found[kind], expected, rtol=0, atol=0)
        assert parsed.attention_factor == scale


def test_without_a_longer_context_no_request_is_long() -> None:
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    parsed = parse({"rope_type": "longrope", **factors}, 4096)
    assert (parsed.short_len, parsed.max_model_len) == (0, 4096)


def test_dynamic_is_default_up_to_where_it_is_served() -> None:
    dynamic = parse({"rope_type": "dynamic", "factor": 4.0}, 4096)
    default = parse({"rope_type": "default"}, 4096)
    assert dynamic.max_model_len == 4096
    assert torch.equal(inverse_frequencies(dynamic, 64), inverse_frequencies(default, 64))


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 4}, 16_384),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_max_model_len(rope: dict[str, Any] | None, length: int) -> None:
    assert parse(rope, 4096).max_model_len == length


def test_both_styles_say_the_same() -> None:
    linear = {"factor": 2.0}
    five = parse({"rope_type": "linear", "rope_theta": 5e5, **linear})
    for key in ("type", "rope_type"):
        scaling = {key: "linear", **linear}
        assert parse(None, rope_theta=5e5, rope_scaling=scaling) == five
    assert parse(None, rope_theta=5e5) == parse({"rope_type": "default", "rope_theta": 5e5})
    assert parse(None).theta == 10_000.0


def test_outer_original_length_holds() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}
    assert parse(yarn, original_max_position_embeddings=2048).original_max_positions == 2048


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"type": "su"}, "su"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_unsupported_rope(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedRope, match=named):
        parse(rope)


def test_unsupported_rope_names_those_supported() -> None:
    with pytest.raises(UnsupportedRope, match="default, linear, dynamic, llama3, yarn"):
        parse({"rope_type": "alibi"})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "4"},
        {"rope_type": "linear", "factor": 0.5},
        {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": 7},
        {"rope_type": "longrope", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]},
        {"rope_type": "longrope", "short_factor": [0.0], "long_factor": [2.0]},
    ],
    ids=str,
)
def test_bad_parameters(rope: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        parse(rope)
