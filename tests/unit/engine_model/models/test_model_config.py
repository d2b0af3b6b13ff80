"""What is read from config.json, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.models.config import (
    ModelConfig,
    load_model_config,
    parse_model_config,
)
from pdserve.engine.models.families import FAMILIES
from pdserve.engine.models.json_fields import JsonFields
from pdserve.kv import KvDtype, KvLayout
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.end_tokens import described, end_tokens
from pdserve.shared.errors import ModelError, UnknownArchitecture, UnsupportedRope
from tests.checkpoints import edit_config, make_checkpoint, to_transformers_4_style

LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
    "eos_token_id": 2,
}


MIXTRAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
EXPERTS = {
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN3_MOE | {"shared_expert_intermediate_size": 5632},
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}


def parse(**changes: Any) -> ModelConfig:
    return parse_model_config(JsonFields(LLAMA_2 | changes, "config.json"))


def parse_as(architecture: str, **changes: Any) -> ModelConfig:
    return parse(architectures=[architecture], **changes)


def test_the_shape_is_read_from_the_config() -> None:
    config = parse(num_key_value_heads=8)
    assert (config.head_dim, config.num_kv_heads, config.max_model_len) == (128, 8, 4096)
    assert config.default_dtype("cpu") == KvDtype.BFLOAT16
    assert config.default_dtype("cuda") == KvDtype.FLOAT16
    assert config.eos_token_ids == {2}
    assert config.kv_layout(16, KvDtype.BFLOAT16) == KvLayout(32, 8, 128, 16, KvDtype.BFLOAT16)


def test_absent_and_null_fields_have_the_architecture_s_defaults() -> None:
    config = parse(head_dim=None, num_key_value_heads=None, rms_norm_eps=None, torch_dtype=None)
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (128, 32, 1e-6)
    assert config.default_dtype("cpu") == KvDtype.FLOAT32
    assert parse_as("Qwen3ForCausalLM").head_dim == 128
    assert parse(dtype="float32").default_dtype("cuda") == KvDtype.FLOAT32
    assert parse(dtype="bfloat16").default_dtype("cuda") == KvDtype.BFLOAT16


def test_model_type_stands_in_for_architectures() -> None:
    assert parse(architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


def test_biases_follow_from_architecture_and_config() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias

    assert biases(parse()) == (False, False, False)
    assert biases(parse(attention_bias=True)) == (True, True, False)
    assert biases(parse(mlp_bias=True)) == (False, False, True)
    assert biases(parse_as("Qwen2ForCausalLM")) == (True, False, False)
    assert biases(parse_as("Qwen3ForCausalLM", attention_bias=True)) == (True, True, False)


def test_sliding_windows_follow_from_architecture_and_config() -> None:
    def windows(architecture: str, **changes: Any) -> tuple[int | None, ...]:
        return parse_as(architecture, num_hidden_layers=3, **changes).sliding_windows

    assert windows("LlamaForCausalLM") == (None, None, None)
    assert windows("MistralForCausalLM") == (4096, 4096, 4096)
    assert windows("MistralForCausalLM", sliding_window=None) == (None, None, None)
    assert windows("MistralForCausalLM", sliding_window=9) == (9, 9, 9)
    qwen = {"sliding_window": 9, "max_window_layers": 1}
    assert windows("Qwen2ForCausalLM", **qwen) == (None, None, None)
    assert windows("Qwen2ForCausalLM", **qwen, use_sliding_window=True) == (None, 9, 9)
    assert windows("Qwen2ForCausalLM", use_sliding_window=True) == (None, None, None)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("Qwen3MoeForCausalLM", **QWEN3_MOE, **qwen) == (None, None, None)
    used = qwen | {"use_sliding_window": True}
    assert windows("Qwen3MoeForCausalLM", **QWEN3_MOE, **used) == (9, 9, 9)
    assert windows("MixtralForCausalLM", **MIXTRAL) == (None, None, None)
    assert windows("MixtralForCausalLM", **MIXTRAL, sliding_window=9) == (9, 9, 9)
    qwen |= {"use_sliding_window": True, "layer_types": kinds}
    assert windows("Qwen3ForCausalLM", **qwen) == (9, None, 9)


def test_experts_are_read_from_the_config() -> None:
    assert parse().experts is None
    mixtral = parse_as("MixtralForCausalLM", **MIXTRAL)
    assert mixtral.experts is not None
    assert (mixtral.experts.num_experts, mixtral.experts.num_chosen) == (8, 2)
    assert mixtral.experts.intermediate_size == mixtral.intermediate_size
    assert mixtral.experts.normalizes_weights
    assert mixtral.experts.layers == frozenset(range(32))
    assert {rope.theta for rope in mixtral.ropes if rope} == {1e6}
    qwen = parse_as("Qwen3MoeForCausalLM", **QWEN3_MOE).experts
    assert qwen is not None
    assert (qwen.num_experts, qwen.num_chosen, qwen.intermediate_size) == (128, 8, 768)
    # As transformers 5 writes it, and with the default of a field.
    renamed = QWEN3_MOE | {"num_experts": None, "num_local_experts": 128, "norm_topk_prob": None}
    assert parse_as("Qwen3MoeForCausalLM", **renamed).experts == dataclasses.replace(
        qwen, normalizes_weights=False
    )


def test_layers_with_experts() -> None:
    def layers(**changes: Any) -> list[int]:
        config = parse_as("Qwen3MoeForCausalLM", num_hidden_layers=6, **QWEN3_MOE, **changes)
        assert config.experts is not None
        return sorted(config.experts.layers)

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[]) == [1, 3, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == [1, 5]


@pytest.mark.parametrize("names", [["FalconForCausalLM"], ["LlamaForSequenceClassification"], []])
def test_unknown_architecture(names: list[str]) -> None:
    with pytest.raises(UnknownArchitecture) as raised:
        parse(architectures=names, model_type="falcon")
    for name in [*names, *FAMILIES]:
        assert name in raised.value.message


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "awq"}}),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}),
        ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}),
        ("LlamaForCausalLM", {"auto_map": {"AutoModelForCausalLM": "modeling.Llama"}}),
        ("LlamaForCausalLM", {"sliding_window": 4096}),
        ("LlamaForCausalLM", {"num_key_value_heads": 5}),
        ("LlamaForCausalLM", {"hidden_size": 4097}),
        ("LlamaForCausalLM", {"head_dim": 127}),
        ("LlamaForCausalLM", {"hidden_size": None}),
        ("LlamaForCausalLM", {"hidden_size": "4096"}),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}),
        ("LlamaForCausalLM", {"tie_word_embeddings": "yes"}),
        ("LlamaForCausalLM", {"eos_token_id": "</s>"}),
        ("LlamaForCausalLM", {"architectures": "LlamaForCausalLM"}),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}),
        ("LlamaForCausalLM", {"rms_norm_eps": -1e-6}),
        ("LlamaForCausalLM", {"rms_norm_eps": 0}),
        ("LlamaForCausalLM", {"rms_norm_eps": float("nan")}),
        ("LlamaForCausalLM", {"rms_norm_eps": 10**400}),
        ("LlamaForCausalLM", {"rope_theta": -1e4}),
        ("LlamaForCausalLM", {"rope_theta": float("inf")}),
        ("MistralForCausalLM", {"attention_bias": True}),
        ("MistralForCausalLM", {"layer_types": ["full_attention"]}),
        ("Qwen2ForCausalLM", {"mlp_bias": True}),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 32}),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}),
        ("Qwen3ForCausalLM", {"layer_types": ["chunked_attention"] * 32}),
        ("LlamaForCausalLM", {"num_experts": 8}),
        ("MistralForCausalLM", {"num_local_experts": 8}),
        ("MixtralForCausalLM", {"attention_bias": True}),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}),
        ("MixtralForCausalLM", {"num_experts": 7}),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": 1}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["0"]}),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": None}),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False}),
        ("LlamaForCausalLM", {"residual_multiplier": 0.2}),
        ("GraniteForCausalLM", {"residual_multiplier": 0}),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["attention", "mamba"]}),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}),
        ("LlamaForCausalLM", {"no_rope_layers": [0, 1]}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 1]}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [2] * 32}),
        ("Olmo2ForCausalLM", {"sliding_window": 4096}),
        ("Cohere2ForCausalLM", {"layer_norm_eps": 0}),
    ],
    ids=str,
)
def test_refused_fields_are_named(architecture: str, changes: dict[str, Any]) -> None:
    (field,) = changes
    with pytest.raises(ModelError, match=field):
        parse(**({"architectures": [architecture]} | EXPERTS.get(architecture, {}) | changes))


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_rotation_of_a_part_of_heads_is_of_some_families(style: str) -> None:
    rope = {style: {"rope_type": "default", "partial_rotary_factor": 0.5}}
    with pytest.raises(UnsupportedRope, match=r"partial_rotary_factor 0\.5"):
        parse(**rope)
    for fields in (rope, {"partial_rotary_factor": 0.5}):
        rope = parse(architectures=["Phi3ForCausalLM"], **fields).ropes[0]
        assert rope is not None
        assert rope.rotated_dims(128) == 64


def test_neutral_values_are_no_reason_to_refuse() -> None:
    parse(partial_rotary_factor=1.0, num_experts=0, quantization_config=None, pretraining_tp=2)
    parse(hidden_act="swish", attention_dropout=0.1, use_cache=False, transformers_version="4.0")


def test_checkpoint_in_both_styles(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    make_checkpoint(tmp_path, "llama", rope_parameters=rope)
    five = load_model_config(resolve_checkpoint(str(tmp_path)))
    to_transformers_4_style(tmp_path)
    assert load_model_config(resolve_checkpoint(str(tmp_path))) == five


def test_every_end_that_a_checkpoint_names_ends_answers(tmp_path: Path) -> None:
    """As a text or an object, one or a list, in an added token or in the vocabulary."""
    make_checkpoint(tmp_path, "llama")
    checkpoint = resolve_checkpoint(str(tmp_path))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    x, y = vocab["x"], vocab["y"]
    cases: list[tuple[object, object, object, set[int]]] = [
        (256, None, None, {256}),
        (x, 7, "<|end|>", {256, 7, x}),
        ([x, 7], [7, 8], {"content": "<|end|>"}, {256, 7, 8, x}),
        (None, x, "y", {x, y}),
        (None, [], "<|no such token|>", set()),
        (None, 10**6, None, set()),
    ]
    for of_model, of_generation, of_tokenizer, expected in cases:
        edit_config(tmp_path, "config.json", eos_token_id=of_model)
        edit_config(tmp_path, "generation_config.json", eos_token_id=of_generation)
        edit_config(tmp_path, "tokenizer_config.json", eos_token=of_tokenizer)
        assert load_model_config(checkpoint).eos_token_ids == expected
    edit_config(tmp_path, "config.json", eos_token_id=x)
    edit_config(tmp_path, "generation_config.json", eos_token_id=[x, 8])
    edit_config(tmp_path, "tokenizer_config.json", eos_token="<|end|>")
    said = described(end_tokens(checkpoint))
    assert f"token {x} (config.json and generation_config.json)" in said
    assert "token 256 (tokenizer_config.json)" in said
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).unlink()
    assert load_model_config(checkpoint).eos_token_ids == {x}
