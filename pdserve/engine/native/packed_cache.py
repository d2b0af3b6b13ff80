"""Packed weights on disk: made by the first start on a host, mapped by all others.

One file for each checkpoint, dtype, quantisation and format. Nodes that start together make it
once: the first one packs, the others wait for it. Whatever goes wrong with the disk, a node packs
into memory of its own and says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pdserve.engine.native.file_lock import file_lock
from pdserve.engine.native.packed_file import UnusableFile, read_packed_file, write_packed_file

log = logging.getLogger(__name__)

_SUFFIX = ".packed"

Arrays = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class PackedCache:
    """Where packed weights are kept between starts."""

    folder: Path
    limit_bytes: int  # of all files together; those not used for longest go first
    wait_s: float  # for another process that is packing the same weights


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file of the cache, for those who show it."""

    path: Path
    num_bytes: int
    used_s: float  # when it was last used, in seconds since the epoch


def packed_files(folder: Path) -> list[PackedFile]:
    """All files of a cache, the one not used for longest first."""
    files = []
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            stat = path.stat()
        except FileNotFoundError:  # somebody else has just removed it
            continue
        files.append(PackedFile(path, stat.st_size, stat.st_mtime))
    return sorted(files, key=lambda file: file.used_s)


def packed_arrays(
    cache: PackedCache | None,
    name: str,
    identity: str,
    pack: Callable[[], Arrays],
    while_waiting: Callable[[], None],
) -> dict[str, Tensor]:
    """Name |-> array: mapped from the cache, or packed into it first, or packed into memory.

    Args:
        cache: None keeps nothing.
        name: for people, of what is packed.
        identity: all that the arrays depend on.
        pack: makes them.
        while_waiting: called now and then while another process packs; may raise.
    """
    if cache is not None:
        try:
            arrays = _from_disk(cache, _path(cache.folder, name, identity), identity, pack,
                                while_waiting)  # fmt: skip
        except OSError as error:
            log.warning("weights are packed into memory that no other node shares: %s", error)
        else:
            if arrays is not None:
                return arrays
    return dict(pack())


def _from_disk(
    cache: PackedCache,
    path: Path,
    identity: str,
    pack: Callable[[], Arrays],
    while_waiting: Callable[[], None],
) -> dict[str, Tensor] | None:
    arrays = _mapped(path, identity)
    if arrays is not None:
        return arrays
    cache.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_suffix(".lock"), cache.wait_s, while_waiting) as is_ours:
        arrays = _mapped(path, identity)  # whoever had the lock before has made it
        if arrays is not None:
            return arrays
        if not is_ours:
            log.warning("another process has been packing %s for %g s", path, cache.wait_s)
            return None
        for left_over in path.parent.glob(f"{path.stem}.*.new"):  # by one who died
            left_over.unlink(missing_ok=True)
        started_s = time.perf_counter()
        write_packed_file(path, identity, pack())
        log.info("packed weights in %.1f s into %s", time.perf_counter() - started_s, path)
        _make_room(cache, path)
        return _mapped(path, identity)


def _mapped(path: Path, identity: str) -> dict[str, Tensor] | None:
    try:
        arrays = read_packed_file(path, identity)
    except FileNotFoundError:
        return None
    except UnusableFile as why:
        log.warning("packing anew: %s cannot be used: %s", path, why)
        return None
    try:
        os.utime(path)  # it was used
    except OSError as error:
        log.debug("%s will look unused: %s", path, error)
    return arrays


def _make_room(cache: PackedCache, newest: Path) -> None:
    """Remove what was not used for longest. Who has it mapped keeps it."""
    files = packed_files(cache.folder)
    excess = sum(file.num_bytes for file in files) - cache.limit_bytes
    for file in files:
        if excess > 0 and file.path != newest:
            log.info("removing %s from the cache: it is full", file.path)
            file.path.unlink(missing_ok=True)
            excess -= file.num_bytes


def _path(folder: Path, name: str, identity: str) -> Path:
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}-{digest}{_SUFFIX}"
