"""Packed arrays are made of every tensor that a model has, and of no other."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from pdserve.engine.models.config import parse_model_config
from pdserve.engine.models.families import FAMILIES
from pdserve.engine.models.json_fields import JsonFields
from pdserve.engine.models.parameters import tensor_shapes
from pdserve.engine.native.sources import EMBEDDING, FINAL_NORM, head_source, layer_source

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
BIASES = {  # of those that leave them to config.json
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Qwen3ForCausalLM": {"attention_bias": True},
}
EXPERTS = {
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}


@pytest.mark.parametrize(
    ("architecture", "is_tied", "has_bias"),
    list(itertools.product(FAMILIES, [False, True], [False, True])),
)
def test_every_tensor_is_used_once_and_fits(
    architecture: str, is_tied: bool, has_bias: bool
) -> None:
    fields: dict[str, object] = {"architectures": [architecture], "tie_word_embeddings": is_tied}
    fields |= EXPERTS.get(architecture, {})
    if has_bias:
        fields |= BIASES.get(architecture, {})
    config = parse_model_config(JsonFields(SIZES | fields, "config.json"))
    shapes = tensor_shapes(config)
    layers = [layer_source(config, index) for index in range(config.num_layers)]
    matrices = [matrix for layer in layers for matrix in layer.matrices]
    used = [EMBEDDING, FINAL_NORM, *(norm for layer in layers for norm in layer.norms)]
    for matrix in [*matrices, head_source(config)]:
        stacked = torch.cat([torch.empty(shapes[name]) for name in matrix.weights])
        assert tuple(stacked.shape) == (matrix.num_out, matrix.num_in)
        assert sum(shapes[name][0] for name in matrix.biases) in (0, matrix.num_out)
        used += [*matrix.weights, *matrix.biases]
    if is_tied:
        used.remove(EMBEDDING)  # it is the head, too
    assert Counter(used) == Counter(shapes.keys())
