"""Reads packed weights into the page cache while Python imports torch. No torch here.

This only guesses the file, and costs nothing if the file is cached already. Choosing the right
file, checking it, and packing weights if there is none, are left to the loader.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.native.packed_folder import files_of_model
from pdserve.engine.native.packed_pages import map_pages
from pdserve.settings.config import EngineConfig, NodeConfig
from pdserve.settings.values import parse_bytes
from pdserve.shared.process.user_cache import cache_folder

log = logging.getLogger(__name__)


def prefetch_weights(config: NodeConfig) -> None:
    """Start reading the file that was last used for a model of this name; returns at once.

    Raises:
        ConfigError: packed_limit is not a size.
    """
    folder = weights_folder(config.engine)
    if folder is None:
        return
    path = Path(config.checkpoint.model or CHECKPOINT_PATH).expanduser()
    own_name = path.resolve().name.removesuffix(".gguf")
    model_id = own_name if path.exists() else config.checkpoint.model
    files = files_of_model(folder, model_id)
    if files:
        threading.Thread(target=_read, args=(files[-1].path,), daemon=True).start()


def weights_folder(engine: EngineConfig) -> Path | None:
    """The directory of packed weights; None if they are not kept, or there is no place for them.

    Raises:
        ConfigError: packed_limit is not a size.
    """
    if parse_bytes(engine.packed_limit) == 0:
        return None
    return cache_folder("weights")


def _read(path: Path) -> None:
    try:
        with path.open("rb") as file:
            map_pages(file.fileno())  # unmapped at once; the page cache keeps what was read
    except (OSError, ValueError) as error:  # ValueError: an empty file, perhaps after a crash
        log.debug("%s is not read ahead: %s", path, error)
