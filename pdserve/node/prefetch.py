"""Asks the disk for packed weights while Python loads torch, which takes longer. No torch here.

It is a guess, and costs nothing where the file is in memory: which file is right, whether it is
sound, and what to do without one, loading finds out as if this did not exist.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from pdserve.config import EngineConfig, NodeConfig
from pdserve.config_values import parse_bytes
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.native.packed_folder import files_of_model
from pdserve.engine.native.packed_pages import map_pages
from pdserve.user_cache import cache_folder

log = logging.getLogger(__name__)


def prefetch_weights(config: NodeConfig) -> None:
    """Start to read the file that was last used for a model of that name, and return.

    Raises:
        ConfigError: packed_limit is no size.
    """
    folder = weights_folder(config.engine)
    if folder is None:
        return
    directory = Path(config.checkpoint.model or CHECKPOINT_PATH).expanduser()
    model_id = directory.resolve().name if directory.is_dir() else config.checkpoint.model
    files = files_of_model(folder, model_id)
    if files:
        threading.Thread(target=_read, args=(files[-1].path,), daemon=True).start()


def weights_folder(engine: EngineConfig) -> Path | None:
    """Where packed weights are kept, if they are; None: they are not to be, or have no place.

    Raises:
        ConfigError: packed_limit is no size.
    """
    if parse_bytes(engine.packed_limit) == 0:
        return None
    return Path(engine.packed_dir) if engine.packed_dir else cache_folder("weights")


def _read(path: Path) -> None:
    try:
        with path.open("rb") as file:
            map_pages(file.fileno())  # and unmap them: what was read stays in memory
    except (OSError, ValueError) as error:  # ValueError: it is empty, after a crash perhaps
        log.debug("%s is not read ahead: %s", path, error)
