"""A checkpoint's sentence-transformers modules: what is done with states or logits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.model_files.checkpoint import Checkpoint, read_json
from pdserve.shared.errors import ModelError

_FILE: Final = "modules.json"


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules, in their order; most checkpoints have none."""

    path: Path  # of the checkpoint
    kinds: list[str]  # class names, such as "Pooling"
    folders: list[str]  # of each

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Modules:
        """Read a checkpoint's. Raises ModelError if its list is invalid."""
        modules = _read(checkpoint.path / _FILE)
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        return cls(checkpoint.path, kinds, [str(module.get("path", "")) for module in modules])

    def config(self, kind: str) -> dict[str, Any]:
        """Return the configuration of the module of this kind. Raises ModelError."""
        folder = self.folders[self.kinds.index(kind)]
        file = self.path / folder / "config.json"
        if not file.resolve().is_relative_to(self.path.resolve()):
            raise ModelError(f"{_FILE} names a folder outside its directory: {folder}")
        config = read_json(file)
        if config is None:
            raise ModelError(f"{_FILE} names {folder}/config.json, which is not there")
        return config


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelError(f"{file} must hold a list of modules")
    return modules
