"""The checkpoints that clusters serve in these tests, and what transformers makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.models.config import load_model_config
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests import reference
from tests.checkpoints import make_checkpoint
from tests.cluster.prompts import make_prompt as make_prompt

# With no ids beyond the tokenizer's (256 bytes, one end of turn), every token can be told from
# what the API says about it.
VOCAB_SIZE = 257
MAX_MODEL_LEN = 4096

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

# name |-> family, what differs from a small model of it
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, GQA, head_dim 64, llama3 rope": (
        "llama",
        {"head_dim": 64, "rope_parameters": _LLAMA3_ROPE},
    ),
    "gemma3, qk-norm, windows, two ropes": ("gemma3", {}),
    "deepseek_v3, latent KV, groups of experts": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ),
    "qwen3, GQA, qk-norm, head_dim 128": ("qwen3", {"head_dim": 128}),
    "gemma2, caps, windows": ("gemma2", {}),
    "llama, MHA, head_dim 128, tied": (
        "llama",
        {"head_dim": 128, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "mistral, GQA, head_dim 64, sharded": ("mistral", {"head_dim": 64, "max_shard_size": "100KB"}),
    "qwen2, one KV head, head_dim 64, tied": (
        "qwen2",
        {"hidden_size": 256, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "phi3, fused, half of a head rotated": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "granite, four factors": ("granite", {}),
    "olmo3, norms behind, windows": ("olmo3", {"seed": 1}),
    "smollm3, a layer without rope": ("smollm3", {}),
    "qwen2 moe, a shared expert": ("qwen2_moe", {}),
    "glm4, four norms, neighbours rotated": ("glm4", {}),
    "gpt-oss, sinks, experts, windows": ("gpt_oss", {}),
    "cohere2, layer norms, parallel": ("cohere2", {}),
}


def make_family(path: Path, name: str) -> Path:
    """The checkpoint of that row of `FAMILIES`."""
    family, overrides = FAMILIES[name]
    overrides = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN} | overrides
    return make_checkpoint(path, family, **overrides)


def make_tiny(path: Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """The smallest: for tests of the cluster, not of the model."""
    return make_tiny_of(path, max_position_embeddings=max_model_len)


def make_tiny_of(path: Path, **overrides: Any) -> Path:
    """The smallest, but for what is said otherwise."""
    small: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return make_checkpoint(path, "llama", **small | overrides)


def make_with_draft(folder: Path) -> tuple[Path, Path]:
    """A model of six layers, of which five add nothing, and a draft model that has the first."""
    model, draft = make_tiny_of(folder / "model", num_hidden_layers=6), folder / "draft"
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        if _layer(name) > 0 and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(model, draft)
    first = {name: tensor for name, tensor in weights.items() if _layer(name) <= 0}
    save_file(first, draft / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return model, draft


def _layer(name: str) -> int:
    """Which layer has this tensor; -1: none."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


class Reference(reference.Reference):
    """In float32, in one thread: beside clusters that compute."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        config = load_model_config(resolve_checkpoint(str(path)))
        is_eager = config.arithmetic.attention_cap or config.has_sinks  # the other has neither
        super().__init__(path, attention="eager" if is_eager else "sdpa")
