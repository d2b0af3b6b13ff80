"""The user's cache directory, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "XDG_CACHE_HOME"


def cache_folder(topic: str) -> Path | None:
    """The directory `pdserve/TOPIC` in the user's cache; None if the user has no home directory."""
    cache = os.environ.get(CACHE_VARIABLE, "")
    if not os.path.isabs(cache):  # the specification says to ignore a relative path
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(cache) / "pdserve" / topic
