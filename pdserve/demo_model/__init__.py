"""The bundled demo model: a tiny Llama, trained by `tools/demo_model` on text that it generates.

`pdserve up` without `--model` serves the checkpoint at `CHECKPOINT_PATH`; `make demo-model`
trains it anew.
"""

from pathlib import Path
from typing import Final

CHECKPOINT_PATH: Final[Path] = Path(__file__).resolve().parent / "checkpoint"
"""A Hugging Face style folder: config.json, model.safetensors, tokenizer.json and so on."""

DRAFT_PATH: Final[Path] = CHECKPOINT_PATH.with_name("draft")
"""A model of a sixth of its size, with its vocabulary: it guesses for it on CPUs."""

DEMO_MODEL_NAME: Final = "pdserve-demo"
"""The model's name in requests."""

__all__ = ["CHECKPOINT_PATH", "DEMO_MODEL_NAME", "DRAFT_PATH"]
