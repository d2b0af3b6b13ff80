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

_RANK: Final = 4
_STRENGTH: Final = 0.1  # of what is added, where inputs are about 1


def write_adapter(folder: Path, checkpoint: Checkpoint, seed: int) -> None:
    """Write an adapter of attention and MLPs, whose answers differ from the model's.

    Raises:
        ModelError: the model's config cannot be read.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    modules = Targets.of(ModelPlan.of(load_model_config(checkpoint))).modules
    tensors: dict[str, Tensor] = {}
    for name, target in modules.items():
        if not name.endswith("_proj"):
            continue
        a = torch.randn(_RANK, target.num_in, generator=generator) / math.sqrt(target.num_in)
        b = torch.randn(target.num_out, _RANK, generator=generator) * _STRENGTH
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
