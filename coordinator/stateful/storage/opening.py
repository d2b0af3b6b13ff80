"""Opens what a coordinator stores responses and conversations in, as the settings say."""

from __future__ import annotations

from pathlib import Path

import msgspec

from coordinator.stateful.storage.shared.entries import SharedEntries
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.store_file import StoreFile
from pdserve.settings.values import IN_MEMORY
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.user_cache import state_file

_URLS = ("postgresql://", "postgres://")


def open_store(store: str, model: str, port: int) -> ResponseStore:
    """Return the store that `answers.store` names.

    Args:
        store: the setting.
        model: name of the served model.
        port: HTTP port of the coordinator; 0: a new one each time, so no file would be found again.

    Raises:
        ConfigError: its file cannot be used, or the URL of its database is wrong.
    """
    if store.startswith(_URLS):
        return ResponseStore(backing=SharedEntries(store))
    path = _path(store, model, port)
    if path is None:
        return ResponseStore()
    try:
        return ResponseStore(backing=StoreFile(path))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} has entries that are not pdserve's: {error}") from error


def place_of_jobs(store: str, model: str, port: int) -> str | Path | None:
    """Return where files and batches are kept beside: a URL, a file, or None for memory."""
    if store.startswith(_URLS):
        return store
    path = _path(store, model, port)
    return None if path is None else path.with_name(f"{path.name}.jobs")


def _path(store: str, model: str, port: int) -> Path | None:
    if store == IN_MEMORY:
        return None
    return Path(store) if store else state_file("responses", model, port)
