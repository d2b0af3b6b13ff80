"""The user's directories for caches and for state, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
import re
from pathlib import Path

CACHE_VARIABLE = "XDG_CACHE_HOME"
STATE_VARIABLE = "XDG_STATE_HOME"


def cache_folder(topic: str) -> Path | None:
    """The directory `pdserve/TOPIC` in the user's cache; None if the user has no home directory."""
    return _folder(CACHE_VARIABLE, ".cache", topic)


def state_folder(topic: str) -> Path | None:
    """The directory `pdserve/TOPIC` of what is to be kept; None without a home directory."""
    return _folder(STATE_VARIABLE, ".local/state", topic)


def state_file(topic: str, model: str, port: int) -> Path | None:
    """The SQLite file of one topic that a coordinator finds again by its model and HTTP port.

    None if it would find none: with port 0, which is another one each time, or without a home.
    """
    folder = state_folder(topic) if port else None
    name = re.sub(r"[^A-Za-z0-9._-]", "_", model)[-128:]
    return None if folder is None else folder / f"{name}-{port}.sqlite"


def _folder(variable: str, default: str, topic: str) -> Path | None:
    root = os.environ.get(variable, "")
    if not os.path.isabs(root):  # the specification says to ignore a relative path
        try:
            root = str(Path.home() / default)
        except RuntimeError:
            return None
    return Path(root) / "pdserve" / topic
