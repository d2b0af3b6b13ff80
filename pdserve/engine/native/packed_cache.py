"""Packed weights on disk: written by the first start on a host, mapped by all later ones.

There is one file per checkpoint, dtype, quantisation and format. If nodes start together, the first
one packs and the others wait for it. On any error of the disk, a node packs into private memory and
logs a warning.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.native.linear import ALIGNMENT
from pdserve.engine.native.packed_file import UnusableFile, read_packed_file, write_packed_file
from pdserve.engine.native.packed_folder import make_room, packed_path
from pdserve.engine.native.packed_pages import HUGE_PAGE_BYTES, private_pages
from pdserve.shared.process.file_lock import file_lock

log = logging.getLogger(__name__)

Arrays = Iterator[tuple[str, Tensor]]

_SHARED_BYTES: Final = 8 * HUGE_PAGE_BYTES  # allocated at a time, for arrays that are smaller


@dataclass(frozen=True, slots=True)
class PackedCache:
    """Where packed weights are kept between starts."""

    folder: Path
    limit_bytes: int  # limit for all files together; the least recently used are removed first
    # How long to wait for another process that is packing the same weights; then they are packed in
    # memory, too.
    wait_s: float = 300.0


def packed_arrays(
    cache: PackedCache | None,
    name: str,
    identity: str,
    pack: Callable[[], Arrays],
    while_waiting: Callable[[], None],
) -> dict[str, Tensor]:
    """Return name |-> array: mapped from the cache, packed into it if needed, or else in memory.

    Args:
        cache: None packs into memory.
        name: human-readable name of the weights.
        identity: everything that the arrays depend on.
        pack: creates the arrays.
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
    pages = _SharedPages()
    return {name: pages.holding(array) for name, array in pack()}


class _SharedPages:
    """Private memory in huge pages that arrays share, as in the cache's file.

    Arrays of a quantised model are smaller than such a page, and one in small pages takes up to 1.7
    times as long to read.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # of the last piece

    def holding(self, array: Tensor) -> Tensor:
        """Copy an array there."""
        size = array.nbytes + -array.nbytes % ALIGNMENT
        if size > self._left.nbytes:
            self._left = torch.from_numpy(private_pages(max(size, _SHARED_BYTES)))
        copy, self._left = self._left[: array.nbytes], self._left[size:]
        return copy.view(array.dtype).view(array.shape).copy_(array)


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
        arrays = _mapped(path, identity)  # the previous holder of the lock may have written it
        if arrays is not None:
            return arrays
        if not is_ours:
            log.warning("another process has been packing %s for %g s", path, cache.wait_s)
            return None
        for left_over in path.parent.glob(f"{path.stem}.*.new"):  # of processes that died
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
        os.utime(path)  # record the use, for LRU removal
    except OSError as error:
        log.debug("%s will look unused: %s", path, error)
    return arrays
