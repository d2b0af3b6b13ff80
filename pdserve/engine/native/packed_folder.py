"""The folder of packed weights: lists files, and removes old ones when it is full. No torch."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

UNTOUCHED_S = 3600.0  # an unfinished file that has not changed for this long is abandoned
_SUFFIX = ".packed"
_UNFINISHED = ".new"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file of packed weights."""

    path: Path
    num_bytes: int
    used_s: float  # when it was last used, in seconds since the epoch


def packed_path(folder: Path, name: str, identity: str) -> Path:
    """Return the path for weights with this identity; `name` makes it human-readable."""
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return folder / f"{_plain(name)}-{digest}{_SUFFIX}"


def packed_files(folder: Path) -> list[PackedFile]:
    """Return all files, least recently used first."""
    return _by_use(folder, f"*{_SUFFIX}")


def files_of_model(folder: Path, name: str) -> list[PackedFile]:
    """Return the files whose names begin with `name`, least recently used first."""
    return _by_use(folder, f"{_plain(name)}-*{_SUFFIX}")


def read_ahead(fd: int) -> None:
    """Let the kernel read the file into the page cache, without waiting for it.

    Requested in pieces, because the kernel reads no more than the device's read-ahead size, some
    MiB, per request.
    """
    for start in range(0, os.fstat(fd).st_size, _PIECE_BYTES):
        os.posix_fadvise(fd, start, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)


def _by_use(folder: Path, pattern: str) -> list[PackedFile]:
    files = []
    for path in folder.glob(pattern):
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process has just removed it
            continue
        files.append(PackedFile(path, stat.st_size, stat.st_mtime))
    return sorted(files, key=lambda file: file.used_s)


def make_room(folder: Path, limit_bytes: int, newest: Path) -> None:
    """Remove abandoned unfinished files, and the least recently used files except `newest`.

    Processes that have a removed file mapped can still use it.
    """
    for file in _by_use(folder, f"*{_UNFINISHED}"):
        if time.time() - file.used_s > UNTOUCHED_S:
            log.info("removing %s: whoever wrote it has died", file.path)
            file.path.unlink(missing_ok=True)
    files = packed_files(folder)
    excess = sum(file.num_bytes for file in files) - limit_bytes
    for file in files:
        if excess > 0 and file.path != newest:
            log.info("removing %s from the cache: it is full", file.path)
            file.path.unlink(missing_ok=True)
            excess -= file.num_bytes


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)
