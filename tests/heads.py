"""EAGLE-3 heads with random weights, in the files that the library `speculators` 0.9 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdserve.engine.drafts.heads.eagle3 import parse_eagle3

_LAYER: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 320,
}


def make_eagle3(path: Path, *, layer: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """A head of the model that `make_checkpoint` makes of "llama"; `layer`: of its own."""
    values: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 100,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "transformer_layer_config": _LAYER | (layer or {}),
    }
    values |= overrides
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(values))
    config = parse_eagle3(values, "made")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2
        if len(shape) > 1
        else torch.rand(shape, generator=generator) + 0.5
        for name, shape in config.shapes.items()
    }
    if "d2t" in weights:
        size, own = config.layer.vocab_size, config.draft_vocab_size
        ids = torch.randperm(size, generator=generator)[:own].sort().values
        weights["d2t"] = ids - torch.arange(own)
        weights["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
    save_file(weights, path / "model.safetensors")
    return path
