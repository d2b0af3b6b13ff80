"""Where what can be made again is kept between starts, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(topic: str) -> Path | None:
    """The folder of one kind of thing among the user's caches; None: the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # which is then to be ignored, says the specification
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(cache) / "pdserve" / topic
