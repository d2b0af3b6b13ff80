"""The memory that processes here can take: the machine's, or less in a container. No torch here."""

from __future__ import annotations

import os
import re
from pathlib import Path

_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # version 2, version 1


def memory_bytes(meminfo: str, field: str) -> int | None:
    """One field in the text of /proc/meminfo, in bytes; None if it is missing."""
    match = re.search(rf"^{field}:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def total_bytes(root: Path = Path("/")) -> int:
    """All memory that processes here can ever have."""
    return _within_limit(root, "MemTotal", "SC_PHYS_PAGES")


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that processes can still allocate: free memory and reclaimable page cache.

    After a start or two, most memory that is not free is page cache: the weights.
    """
    return _within_limit(root, "MemAvailable", "SC_AVPHYS_PAGES")


def container_limit_bytes(root: Path = Path("/")) -> int | None:
    """The limit of the container that this process is in; None: there is none.

    /proc/meminfo tells of the machine even there, and beyond the limit the kernel kills.
    """
    for name in _CGROUP_LIMITS:
        limit = _read(root / "sys/fs/cgroup" / name).strip()
        if limit.isdigit():
            return int(limit)  # version 1 writes "none" as a number larger than any memory
    return None


def _within_limit(root: Path, field: str, pages: str) -> int:
    of_machine = memory_bytes(_read(root / "proc/meminfo"), field)
    if of_machine is None:
        of_machine = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    limit = container_limit_bytes(root)
    return of_machine if limit is None else min(of_machine, limit)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
