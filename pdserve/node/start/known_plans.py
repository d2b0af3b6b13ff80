"""What a process has found out about models, for as long as their files are what they were.

To plan a model its files are listed, sampled and described, which is a good part of a wake. A
process that was a node of it before has only to see that they have not changed: by names, sizes,
inodes and times of modification, as of packed weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pdserve.node.start.draft import plan_models
from pdserve.node.start.model import NodeModel
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig

_Stamps: TypeAlias = list[tuple[str, int, int, int]]  # name, inode, bytes, modified


@dataclass(frozen=True, slots=True)
class _Known:
    config: NodeConfig
    files: _Stamps
    model: NodeModel


class KnownPlans:
    """The last plan of each model of a process. KV stays as large as at first."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, NodeRole], _Known] = {}

    def of(self, config: NodeConfig, role: NodeRole) -> NodeModel:
        """Return the plan of a node's model. Raises as `plan_models`."""
        files, key = _stamps(config.checkpoint.model), (config.checkpoint.model, role)
        known = self._known.get(key)
        if known is not None and (known.config, known.files) == (config, files):
            return known.model
        model = plan_models(config, role)
        if files and model.draft is None:  # whose files are elsewhere
            self._known[key] = _Known(config, files, model)
        return model


def _stamps(source: str | None) -> _Stamps:
    """Return those of a model's files; of what is not here, as on a hub, none."""
    path = Path(source or "").expanduser()
    if source is None or not path.exists():
        return []
    try:
        with os.scandir(path if path.is_dir() else path.parent) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return []
    return sorted((n, stat.st_ino, stat.st_size, stat.st_mtime_ns) for n, stat in stats)
