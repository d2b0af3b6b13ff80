"""The plan of a model: what all ranks have together is the model, each number once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.models.config import ModelConfig, parse_model_config
from pdserve.engine.models.families import FAMILIES
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.parameters import allocate_weights
from pdserve.engine.plan.forms import FLOAT32, FORMS, INT8, ActivationDtype, coded_form, form_of
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.model_files.coding import Coding, ScaleType
from pdserve.shared.errors import ConfigError

SIZES: Final = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,  # as Granite 4 calls it
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
LATENT: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 52,
    "q_lora_rank": 44,
    "qk_nope_head_dim": 28,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
BIASES: Final = {  # of those that leave them to config.json
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Qwen3ForCausalLM": {"attention_bias": True},
    "DeepseekV3ForCausalLM": {"attention_bias": True},
}
EXPERTS: Final = {
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "GptOssForCausalLM": {"num_local_experts": 5, "num_experts_per_tok": 3},
    "DeepseekV2ForCausalLM": LATENT | {"q_lora_rank": None},
    "DeepseekV3ForCausalLM": LATENT,
}
# Those that ranks can share out.
ARCHITECTURES: Final = st.sampled_from(sorted(FAMILIES.keys() - {"Qwen3NextForCausalLM"}))


def config_of(architecture: str, *, is_tied: bool = False, has_bias: bool = False) -> ModelConfig:
    fields: dict[str, Any] = {"architectures": [architecture], "tie_word_embeddings": is_tied}
    fields |= EXPERTS.get(architecture, {}) | (BIASES.get(architecture, {}) if has_bias else {})
    return parse_model_config(JsonFields(SIZES | fields, "config.json"))


def numbers_had(plan: ModelPlan) -> Counter[str]:
    """Tensor of the checkpoint |-> how many of its numbers the rank has in its matrices."""
    had: Counter[str] = Counter()
    for matrix in plan.matrices:
        for part in matrix.parts:
            had[part.weight] += len(part.rows) * matrix.num_in
            had[part.bias] += len(part.rows) * matrix.has_bias
    return +had


@given(ARCHITECTURES, st.booleans(), st.booleans(), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_ranks_have_all_of_the_model_together(
    architecture: str, is_tied: bool, has_bias: bool, num_ranks: int, num_stages: int
) -> None:
    """Each number once, but for KV heads and latents that are replicated, and for routers."""
    config = config_of(architecture, is_tied=is_tied, has_bias=has_bias)
    shapes = ModelPlan.of(config).expected()
    found: Counter[str] = Counter()
    for stage in range(num_stages):
        for rank in range(num_ranks):
            found += numbers_had(ModelPlan.of(config, Shard(rank, num_ranks, stage, num_stages)))
    for name, shape in shapes.items():
        is_vector = "norm" in name or name.endswith(("e_score_correction_bias", "sinks"))
        if is_vector or (name.startswith("model.embed") and not is_tied):
            assert name not in found
            continue
        is_replicated = any(each in name for each in ("k_proj", "v_proj", "q_a_", "kv_a_"))
        copies = max(1, num_ranks // config.num_kv_heads) if is_replicated else 1
        is_router = name.endswith((".gate.weight", "shared_expert_gate.weight")) or "router" in name
        expected = math.prod(shape) * (num_ranks if is_router else copies)
        assert found.pop(name) == expected, name
    assert not found


@given(ARCHITECTURES, st.booleans(), st.sampled_from([WHOLE, Shard(1, 2), Shard(0, 1, 1, 2)]))
def test_torch_has_a_slot_for_each_tensor_of_the_rank(
    architecture: str, is_tied: bool, shard: Shard
) -> None:
    config = config_of(architecture, is_tied=is_tied)
    plan = ModelPlan.of(config, shard)
    slots = allocate_weights(plan, torch.bfloat16, torch.device("meta")).slots
    expected = {*numbers_had(plan), *(norm.tensor for norm in plan.norms)}
    expected |= set() if plan.embedding is None else {plan.embedding.weight}
    assert slots.keys() == expected
    shapes = plan.expected()
    for name, slot in slots.items():
        part = torch.empty(shapes[name], device="meta")[slot.part]
        assert part.expand(slot.destination.shape).shape == slot.destination.shape, name


def test_a_form_says_what_it_takes_and_where_it_can_be_cut() -> None:
    four_bits = coded_form(Coding(4, 32, has_minimums=True))
    assert four_bits.num_bytes(3, 64) == 3 * 64 * 4 // 8 + 3 * 2 * 2 * 2
    assert [four_bits.can_cut(5, column) for column in (0, 16, 32)] == [True, False, True]
    two_levels = coded_form(Coding(6, 16, 32, ScaleType.TWO_LEVELS))
    assert two_levels.num_bytes(3, 512) == 3 * (512 * 6 // 8 + 512 // 16 + 2 * 2)
    assert not two_levels.can_cut(0, 128)
    blocks = replace(INT8, group=(128, 128))
    assert blocks.num_bytes(129, 128) == 129 * 128 + 2 * 4
    assert not blocks.can_cut(64, 128)
    assert INT8.num_bytes(3, 70) == 3 * 70 + 3 * 4
    assert INT8.can_cut(5, 7)
    assert FLOAT32.num_bytes(3, 70) == 3 * 70 * 4


def test_ranks_that_would_share_scales_are_refused() -> None:
    config = config_of("LlamaForCausalLM")
    blocks = replace(INT8, name="blocks", group=(32, 32))
    ModelPlan.of(config, form=blocks)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel 2: model.layers.0.qkv cannot be divided so"
    ):
        ModelPlan.of(config, Shard(1, 2), form=blocks)


def test_what_is_not_quantised_has_the_type_of_activations() -> None:
    for dtype in ActivationDtype:
        assert form_of("none", dtype) is FORMS[dtype]
        assert form_of("int8", dtype) is INT8
        assert FORMS[dtype].bits == 8 * dtype.itemsize
        assert (FORMS[dtype].quantization, INT8.quantization) == ("none", "int8")
