"""Adapters with random numbers for any model, in the form of PEFT."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from pdserve.engine.adapters.config import CONFIG_FILE
from pdserve.engine.adapters.read import PREFIX, WEIGHTS_FILE
from pdserve.engine.adapters.targets import Targets
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import Checkpoint

_STRENGTH: Final = 0.1  # of what is added, where inputs are about 1


def write_adapter(
    folder: Path,
    checkpoint: Checkpoint,
    seed: int,
    *,
    rank: int = 4,
    ends: tuple[str, ...] = ("_proj",),
) -> None:
    """Write an adapter whose answers differ from the model's.

    Args:
        folder: to make.
        checkpoint: of the model.
        seed: of its numbers.
        rank: of all.
        ends: of the names of its modules; by default attention and MLPs have such.

    Raises:
        ModelError: the model's config cannot be read.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    modules = Targets.of(ModelPlan.of(load_model_config(checkpoint))).modules
    tensors: dict[str, Tensor] = {}
    for name, target in modules.items():
        if not name.endswith(ends):
            continue
        a = torch.randn(rank, target.num_in, generator=generator) / math.sqrt(target.num_in)
        b = torch.randn(target.num_out, rank, generator=generator) * _STRENGTH
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
