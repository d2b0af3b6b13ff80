"""Tensors in safetensors files: memory-mapped, of torch's types."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.engine.weights.stored import Found, Shapes, listed
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.shared.errors import ModelError

# Tables that older exporters saved although they follow from config.json.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# As transformers 5 has them in memory, and can be told to save them: all experts in one tensor.
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_CONVERTIBLE = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


def safetensors(checkpoint: Checkpoint, expected: Shapes) -> Found:
    """Find tensors, which share the pages of the mapped files. Raises as `stored.Reader`."""
    found: dict[str, Tensor] = {}
    file_of: dict[str, Path] = {}
    others: list[str] = []
    for file in checkpoint.weight_files():
        for name, tensor in _tensors(file):
            if name not in expected:
                others += [] if _DERIVED.search(name) else [name]
            elif tensor.dtype not in _CONVERTIBLE:
                raise ModelError(
                    f"{file}: {name} is of type {tensor.dtype}; quantised weights are not supported"
                )
            else:
                found[name], file_of[name] = tensor, file
    if fused := [name for name in others if _FUSED.search(name)]:
        raise ModelError(
            f"{checkpoint.path} holds {listed(fused)}, each with all experts of a layer; save the "
            "model with tensors for each expert, which save_pretrained does by default"
        )
    return Found(found, file_of, others)


def _tensors(file: Path) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            return [(name, tensors.get_tensor(name)) for name in tensors.offset_keys()]
    except (SafetensorError, OSError) as error:
        refuse_pointer(file)
        raise ModelError(f"{file} is damaged or cannot be read: {error}") from error
