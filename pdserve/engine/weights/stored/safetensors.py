"""Tensors in safetensors files: memory-mapped, of torch's types, or codes of quantised matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.engine.models.quantised.config import quantisation_of
from pdserve.engine.weights.stored.modules import quantised_matrices
from pdserve.engine.weights.stored.stacks import unstack
from pdserve.engine.weights.stored.tensors import Found, Shapes, StoredTensor, listed
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.git_lfs import refuse_pointer
from pdserve.model_files.stored_types import renaming
from pdserve.shared.errors import ModelError

# Tables that older exporters saved although they follow from config.json.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# As transformers 5 has them in memory, and can be told to save them: all experts in one tensor.
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_CONVERTIBLE = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


def safetensors(checkpoint: Checkpoint, expected: Shapes) -> Found:
    """Find tensors, which share the pages of the mapped files. Raises as `stored.Reader`."""
    tensors, file_of = _all_tensors(checkpoint)
    quantisation = quantisation_of(checkpoint)
    matrices, used = (
        ({}, set[str]())
        if quantisation is None
        else quantised_matrices(tensors, file_of, expected, quantisation)
    )
    experts = unstack(tensors, file_of)
    used |= experts.used
    file_of |= experts.file_of
    found: dict[str, StoredTensor] = {}
    others: list[str] = []
    for name, tensor in {**tensors, **experts.tensors}.items():
        if name in used:
            continue
        if name not in expected or name in matrices:
            others += [] if _DERIVED.search(name) else [name]
        elif isinstance(tensor, Tensor) and tensor.dtype not in _CONVERTIBLE:
            raise ModelError(
                f"{file_of[name]}: {name} is of type {tensor.dtype}, and config.json does not say "
                "how it is quantised (quantization_config)"
            )
        else:
            found[name] = tensor
    files = file_of | {name: _file_of_module(name, file_of) for name in matrices}
    if fused := [name for name in others if _FUSED.search(name)]:
        raise ModelError(
            f"{checkpoint.path} holds {listed(fused)}, each with all experts of a layer; save the "
            "model with tensors for each expert, which save_pretrained does by default"
        )
    return Found(found | matrices, files, others)


def _all_tensors(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """All that the files hold, and the file of each."""
    tensors: dict[str, Tensor] = {}
    file_of: dict[str, Path] = {}
    named = renaming(checkpoint)
    for file in checkpoint.weight_files():
        for name, tensor in ((named(name), tensor) for name, tensor in _tensors(file)):
            if name in tensors:
                raise ModelError(f"{file_of[name]} and {file} both hold {name}: remove one")
            tensors[name], file_of[name] = tensor, file
    return tensors, file_of


def _file_of_module(name: str, file_of: Mapping[str, Path]) -> Path:
    module = name.removesuffix("weight")
    return next(file for other, file in file_of.items() if other.startswith(module))


def _tensors(file: Path) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            return [(name, tensors.get_tensor(name)) for name in tensors.offset_keys()]
    except (SafetensorError, OSError) as error:
        refuse_pointer(file)
        raise ModelError(f"{file} is damaged or cannot be read: {error}") from error
