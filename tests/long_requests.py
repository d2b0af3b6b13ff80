"""A model with other rotary factors for long requests, and transformers with the factors of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from tests.checkpoints import edit_config

SHORT_LEN: Final = 256  # what is admitted for more tokens is long
_ROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
}
# Of a checkpoint of phi3 with heads of 16.
LONG_ROPE: Final[dict[str, Any]] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": SHORT_LEN,
    "rope_parameters": _ROPE,
}


def with_one_rope(path: Path, copy: Path, factors: str) -> Path:
    """Copy a checkpoint; the copy has these factors ("short" or "long") at every length."""
    shutil.copytree(path, copy)
    config = json.loads((path / "config.json").read_text())
    rope = config["rope_parameters"]
    one = rope[f"{factors}_factor"]
    edit_config(copy, rope_parameters=rope | {"short_factor": one, "long_factor": one})
    return copy
