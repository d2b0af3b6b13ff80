"""Packed weights on disk: made by the first start on a host, mapped by all others.

One file for each checkpoint, dtype, quantisation and format. Nodes that start together make it
once: the first one packs, the others wait for it. Whatever goes wrong with the disk, a node packs
into memory of its own and says so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pdserve.engine.native.file_lock import file_lock
from pdserve.engine.native.packed_file import UnusableFile, read_packed_file, write_packed_file
from pdserve.engine.native.packed_folder import make_room, packed_path
from pdserve.engine.native.packed_pages import HUGE_PAGE_BYTES, private_pages

log = logging.getLogger(__name__)

Arrays = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class PackedCache:
    """Where packed weights are kept between starts."""

    folder: Path
    limit_bytes: int  # of all files together; those not used for longest go first
    wait_s: float  # for another process that is packing the same weights


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
        path = packed_path(cache.folder, name, identity)
        try:
            arrays = _from_disk(cache, path, identity, pack, while_waiting)
        except OSError as error:
            log.warning("weights are packed into memory that no other node shares: %s", error)
        else:
            if arrays is not None:
                return arrays
    return {name: _in_huge_pages(array) for name, array in pack()}


def _in_huge_pages(array: Tensor) -> Tensor:
    """As the cache's file would have it; those that are small stay where they are."""
    if array.nbytes < 2 * HUGE_PAGE_BYTES:
        return array
    copy = torch.from_numpy(private_pages(array.nbytes)).view(array.dtype).view(array.shape)
    return copy.copy_(array)


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
        make_room(cache.folder, cache.limit_bytes, path)
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
