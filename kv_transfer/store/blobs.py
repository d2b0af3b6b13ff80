"""What a prefix store is made of: named bytes, written as a whole or not at all.

Many nodes, of one machine or of several, share one store without a lock: names say what the bytes
are, so who writes a name writes the same, and who removes one removes what anybody may miss.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.shared.errors import CorruptTransfer

_PARTS: Final = ".parts"  # the folder of what is being written
_LEFT_S: Final = 3600.0  # after which what is being written is a leftover of a process that died
FREE_SHARE: Final = 2  # a store takes one of so many bytes that it could have


@dataclass(frozen=True, slots=True)
class Blob:
    """What a store has under one name."""

    name: str
    num_bytes: int
    stamp_s: float  # since the epoch: when it was used last, or as `Blobs.use` says


class Blobs(Protocol):
    """Named bytes. Any thread may call; all raise OSError if the store does not do it."""

    def open(self) -> None:
        """Look whether the store is there, or make it."""
        ...

    def read(self, name: str, into: NDArray[np.uint8]) -> bool:
        """Fill `into` with all bytes of a name; False: there is no such name.

        Raises:
            CorruptTransfer: they are fewer or more.
        """
        ...

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        """Give a name these bytes. Readers see all of them or none."""
        ...

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        ...

    def use(self, name: str, stamp_s: float) -> None:
        """Stamp a name, if it is there and the store keeps stamps."""
        ...

    def stamp(self, name: str) -> float | None:
        """When it was written or used last; None: there is no such name."""
        ...

    def blobs(self, within: str = "") -> Iterator[Blob]:
        """All that there is, or below a folder. Removes what crashed writers have left."""
        ...

    def most_bytes(self, present: int) -> int:
        """Bytes that it may have, if it has `present` of them now and nobody says more."""
        ...


class FolderBlobs:
    """Files below a folder, on a local or a network file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts = folder / _PARTS

    def open(self) -> None:
        """Make the folder if need be, for this user alone. Raises OSError: it cannot be."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._parts.mkdir(mode=0o700, exist_ok=True)

    def read(self, name: str, into: NDArray[np.uint8]) -> bool:
        """As Blobs.read."""
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != len(into):
                    raise CorruptTransfer(f"{name} has {size} bytes instead of {len(into)}")
                view, start = into.data, 0
                while start < size and (count := file.readinto(view[start:])):
                    start += count
        except FileNotFoundError:
            return False
        if start < size:
            raise CorruptTransfer(f"{name} ended after {start} of its {size} bytes")
        return True

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        """As Blobs.write."""
        part = self._parts / secrets.token_hex(8)
        path = self._folder / name
        try:
            # Not synced: after a crash of the machine, the sum tells what has not arrived.
            part.write_bytes(data.data)
            path.parent.mkdir(parents=True, exist_ok=True)
            part.rename(path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """As Blobs.remove."""
        (self._folder / name).unlink(missing_ok=True)

    def use(self, name: str, stamp_s: float) -> None:
        """As Blobs.use."""
        with suppress(FileNotFoundError):
            os.utime(self._folder / name, (stamp_s, stamp_s))

    def stamp(self, name: str) -> float | None:
        """As Blobs.stamp."""
        try:
            return (self._folder / name).stat().st_mtime
        except FileNotFoundError:
            return None

    def blobs(self, within: str = "") -> Iterator[Blob]:
        """As Blobs.blobs."""
        self.open()  # somebody may have removed it
        self._sweep()
        yield from _files(self._folder / within, f"{within}/" if within else "")

    def most_bytes(self, present: int) -> int:
        """Half of what would be free if it had nothing."""
        found = os.statvfs(self._folder)
        return (present + found.f_bavail * found.f_frsize) // FREE_SHARE

    def _sweep(self) -> None:
        with suppress(FileNotFoundError), os.scandir(self._parts) as parts:
            for part in parts:
                with suppress(FileNotFoundError):
                    if time.time() - part.stat().st_mtime > _LEFT_S:
                        Path(part.path).unlink()


def _files(folder: Path, prefix: str) -> Iterator[Blob]:
    """The files below a folder; others may remove them, and folders, meanwhile."""
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        for one in found:
            with suppress(FileNotFoundError):
                if one.is_dir(follow_symlinks=False):
                    if one.name != _PARTS:
                        yield from _files(Path(one.path), f"{prefix}{one.name}/")
                elif one.is_file(follow_symlinks=False):
                    status = one.stat(follow_symlinks=False)
                    yield Blob(prefix + one.name, status.st_size, status.st_mtime)
