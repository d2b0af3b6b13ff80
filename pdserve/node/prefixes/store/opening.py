"""Whether there is a prefix store where the settings say, before a node starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from kv_transfer.lone_thread import LoneThread
from kv_transfer.store.blobs import FolderBlobs
from pdserve.settings.prefixes import PrefixConfig
from pdserve.shared.process.may_pass import NotNow, config_error

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0


def blobs_of(config: PrefixConfig) -> FolderBlobs:
    """What the store is made of; nothing is looked at."""
    return FolderBlobs(Path(config.kv_store).expanduser())


def check_store(config: PrefixConfig, look_s: float = LOOK_S) -> None:
    """Look whether there can be a store. One that does not answer may come back.

    Raises:
        ConfigError: there can be none.
    """
    thread = LoneThread("kv-store-look")
    try:
        thread.submit(blobs_of(config).open).result(look_s)
    except TimeoutError:
        log.warning("kv_store %r does not answer within %g s", config.kv_store, look_s)
    except OSError as error:
        failure = config_error(f"kv_store {config.kv_store!r} cannot be used: {error}", error)
        if not isinstance(failure, NotNow):
            raise failure from error
        log.warning("%s", failure)
    finally:
        thread.close()
