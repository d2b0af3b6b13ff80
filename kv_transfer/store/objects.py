"""A prefix store in an object store, and what a store is by its address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.store.blobs import Blob, Blobs, FolderBlobs
from pdserve.model_files.objects.opening import first_line, is_object_url, open_store
from pdserve.shared.errors import ConfigError, CorruptTransfer

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def blobs_at(where: str) -> Blobs:
    """Return the store in a folder, or at s3:// or gs://; nothing is asked of it yet.

    Raises:
        ConfigError: there can be none.
    """
    if not is_object_url(where):
        return FolderBlobs(Path(where).expanduser())
    if where.startswith("http"):
        raise ConfigError(f"{where!r} cannot be written: give a folder, s3:// or gs://")
    return ObjectBlobs(open_store(where))


class ObjectBlobs:
    """Objects. They keep no stamps but of when they were written."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def open(self) -> None:
        """As Blobs.open: look whether it answers."""
        self.stamp("erased/_")

    def read(self, name: str, into: NDArray[np.uint8]) -> bool:
        """As Blobs.read."""
        import obstore

        try:
            with _failures():
                data = memoryview(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return False
        if len(data) != len(into):
            raise CorruptTransfer(f"{name} has {len(data)} bytes instead of {len(into)}")
        into[:] = np.frombuffer(data, np.uint8)
        return True

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        """As Blobs.write."""
        import obstore

        with _failures():
            obstore.put(self._store, name, data.data)

    def remove(self, name: str) -> None:
        """As Blobs.remove."""
        import obstore

        with _failures():
            obstore.delete(self._store, name)

    def use(self, name: str, stamp_s: float) -> None:
        """As Blobs.use: there are no stamps to set."""

    def stamp(self, name: str) -> float | None:
        """As Blobs.stamp."""
        import obstore

        try:
            with _failures():
                return _stamp(obstore.head(self._store, name))
        except FileNotFoundError:
            return None

    def blobs(self, within: str = "") -> Iterator[Blob]:
        """As Blobs.blobs."""
        import obstore

        with _failures():
            for metas in obstore.list(self._store, within or None):
                for meta in metas:
                    yield Blob(meta["path"], meta["size"], _stamp(meta))

    def most_bytes(self, present: int) -> int:
        """What it has: it grows without end, so its size has to be said."""
        return present


def _stamp(meta: Any) -> float:
    return float(meta["last_modified"].timestamp())


@contextmanager
def _failures() -> Iterator[None]:
    """Make errors of obstore those of a file system."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        raise OSError(first_line(error)) from error
