"""Heads with random weights: EAGLE-3, in the files that the library `speculators` 0.9 writes, and
layers of DeepSeek V3 that predict further tokens, as its checkpoints have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from pdserve.engine.drafts.heads.eagle3 import parse_eagle3
from tests.checkpoints import edit_config

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


def add_mtp(path: Path, *, num_layers: int = 1, has_embedding: bool = True) -> Path:
    """Add to a checkpoint of DeepSeek V3 layers that predict a token further each.

    transformers writes and reads none. Names and shapes are those of DeepSeek's files.
    """
    edit_config(path, num_nextn_predict_layers=num_layers)
    file = path / "model.safetensors"
    tensors, config = load_file(file), DeepseekV3Config.from_pretrained(path)
    for number in range(config.num_hidden_layers, config.num_hidden_layers + num_layers):
        own = _mtp_layer(config, number, has_embedding)
        tensors |= {f"model.layers.{number}.{name}": tensor for name, tensor in own.items()}
    save_file(tensors, file, {"format": "pt"})
    return path


def _mtp_layer(
    config: DeepseekV3Config, number: int, has_embedding: bool
) -> dict[str, torch.Tensor]:
    generator, hidden = torch.Generator().manual_seed(number + 3), config.hidden_size

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    layer = DeepseekV3DecoderLayer(config, number)
    own = {name: randn(*tensor.shape) for name, tensor in layer.state_dict().items()}
    experts = [name for name in own if ".experts." in name]
    for name in experts:  # stacked in memory, and each by itself in files
        stack = own.pop(name)
        kinds = ("gate", "up") if "gate_up" in name else ("down",)
        for place, expert in enumerate(stack):
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                own[f"mlp.experts.{place}.{kind}_proj.weight"] = part.contiguous()
    own |= {
        "enorm.weight": randn(hidden) + 1,
        "hnorm.weight": randn(hidden) + 1,
        "eh_proj.weight": randn(hidden, 2 * hidden),
        "shared_head.norm.weight": randn(hidden) + 1,
        "shared_head.head.weight": randn(config.vocab_size, hidden),
    }
    if has_embedding:
        own["embed_tokens.weight"] = randn(config.vocab_size, hidden)
    return own
