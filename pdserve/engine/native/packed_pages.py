"""Maps a file of weights into memory, shared by all processes that map it, and in huge pages.

Decode steps mostly stream weights, and with 4 KiB pages a core does so at about 0.7 of the rate.
The page cache holds a file in huge pages if it was written in large pieces, or if it is first read
through a mapping that asks for them (ext4, XFS and others since Linux 6.16). Existing small pages
stay small, so they are dropped and read again, once, if no other process uses them.
No torch here.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.engine.native.packed_folder import read_ahead

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20

_WORTH_IT_BYTES = 64 << 20  # smaller files are fast to stream in any case
_TRIED_BYTES = 4 * HUGE_PAGE_BYTES  # part to try rereading first: cheap even if it does not help
_MOSTLY = 0.5
_MOST_LOOKED_AT = 1024
_looked_at: set[tuple[int, int, int]] = set()  # device, inode and size of files
_HUGE_PAGES = re.compile(r"^FilePmdMapped:\s+(\d+) kB$", re.MULTILINE)


def map_pages(fd: int, worth_it_bytes: int = _WORTH_IT_BYTES) -> NDArray[np.uint8]:
    """Map a whole file, read-only. Its pages are read in when this returns, if the kernel can.

    Of at least `worth_it_bytes` it makes sure that they are huge, if they can be: once, since that
    takes longer than to map it.

    Raises:
        OSError: it cannot be mapped.
    """
    stat = os.fstat(fd)
    file = stat.st_dev, stat.st_ino, stat.st_size
    mapped = _mapped(fd, stat.st_size)
    if stat.st_size < worth_it_bytes or file in _looked_at:
        return mapped
    if huge_share(mapped) <= _MOSTLY:
        del mapped  # mapped pages cannot be dropped from the page cache
        is_of_use = huge_share(_read_anew(fd, min(stat.st_size, _TRIED_BYTES))) > _MOSTLY
        mapped = _read_anew(fd, stat.st_size) if is_of_use else _mapped(fd, stat.st_size)
        log.info("%.0f %% of the weights are in huge pages", 100 * huge_share(mapped))
    if len(_looked_at) >= _MOST_LOOKED_AT:
        _looked_at.clear()
    _looked_at.add(file)
    return mapped


def private_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate private memory, in huge pages if the kernel supports them."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.debug("this kernel has no huge pages: %s", error)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    return array[start : start + num_bytes]


def huge_share(mapped: NDArray[np.uint8]) -> float:
    """Return the share of a mapped file that is in huge pages."""
    text = Path("/proc/self/smaps").read_text()
    start = text.find(f"{mapped.ctypes.data:x}-")
    found = _HUGE_PAGES.search(text, start) if start >= 0 else None
    return int(found[1]) * 1024 / mapped.nbytes if found else 0.0


def _read_anew(fd: int, num_bytes: int) -> NDArray[np.uint8]:
    os.posix_fadvise(fd, 0, num_bytes, os.POSIX_FADV_DONTNEED)
    return _mapped(fd, num_bytes)


def _mapped(fd: int, size: int) -> NDArray[np.uint8]:
    mapped = _native.map_shared(fd, size, writable=False)
    if not _native.read_in(mapped):
        read_ahead(fd)
    return mapped
