"""Random adapters in the form of PEFT, and the merged checkpoint that each must equal."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    base: Path,
    *,
    modules: Sequence[str] = ALL_LINEAR,
    rank: int = 4,
    seed: int = 0,
    strength: float = 1.0,
    own: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of a model's modules whose names end so.

    Args:
        folder: to make.
        base: the model's checkpoint.
        modules: ends of names.
        rank: of all.
        seed: of its numbers.
        strength: of what it adds, roughly relative to the weights.
        own: further tensors, by their whole names.
        config: further fields.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not any(module.endswith(end) for end in modules):
            continue
        num_out, num_in = weight.shape
        size = strength * float(weight.std()) / math.sqrt(rank)
        key = f"base_model.model.{module}.lora"
        tensors[f"{key}_A.weight"] = torch.randn(rank, num_in, generator=generator)
        tensors[f"{key}_B.weight"] = size * torch.randn(num_out, rank, generator=generator)
        if config.get("lora_bias"):
            tensors[f"{key}_B.bias"] = size * torch.randn(num_out, generator=generator)
        if config.get("use_dora"):
            stretch = 1 + 0.3 * torch.randn(num_out, generator=generator)
            tensors[f"{key}_magnitude_vector"] = stretch * weight.float().norm(dim=1)
    tensors |= own or {}
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    return folder


def edit_adapter(folder: Path, **fields: Any) -> None:
    """Change fields of its config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, **tensors: Tensor | None) -> None:
    """Change tensors, by the ends of their names; None: remove one."""
    path = folder / "adapter_model.safetensors"
    every = load_file(path)
    for end, tensor in tensors.items():
        (name,) = [name for name in every if name.endswith(end)]
        every.pop(name)
        if tensor is not None:
            every[name] = tensor
    save_file(every, path)


def merged(folder: Path, base: Path, adapter: Path, scale: float = 1.0) -> Path:
    """Write the model with an adapter without biases added to its weights."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] += scale * (b @ a)
        elif key.endswith("_proj.weight") or key.endswith("lm_head.weight"):
            weights[key.removeprefix("base_model.model.")] = a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
