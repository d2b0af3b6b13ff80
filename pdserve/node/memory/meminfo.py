"""The memory that processes here can take: the machine's, or less in a container. No torch here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Accounting:
    """Where a container's memory is accounted for: files, and what page cache not in use is called.

    That cache counts as used, but is reclaimed before anything is killed.
    """

    limit: str
    used: str
    stat: str
    cache: str


_CGROUPS = (  # version 2, version 1
    _Accounting("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Accounting(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def memory_bytes(meminfo: str, field: str) -> int | None:
    """One field in the text of /proc/meminfo, in bytes; None if it is missing."""
    kilobytes = _number(rf"^{field}:\s*(\d+) kB$", meminfo)
    return None if kilobytes is None else kilobytes * 1024


def total_bytes(root: Path = Path("/")) -> int:
    """All memory that processes here can ever have."""
    of_machine = _of_machine(root, "MemTotal", "SC_PHYS_PAGES")
    limit = container_limit_bytes(root)
    return of_machine if limit is None else min(of_machine, limit)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that processes can still allocate: free memory and reclaimable page cache.

    After a start or two, most memory that is not free is page cache: the weights.
    """
    of_machine = _of_machine(root, "MemAvailable", "SC_AVPHYS_PAGES")
    limit = container_limit_bytes(root)
    return of_machine if limit is None else min(of_machine, max(0, limit - _held_bytes(root)))


def container_limit_bytes(root: Path = Path("/")) -> int | None:
    """The limit of the container that this process is in; None: there is none.

    /proc/meminfo tells of the machine even there, and beyond the limit the kernel kills.
    """
    for cgroup in _CGROUPS:
        limit = _number(r"^(\d+)$", _read_cgroup(root, cgroup.limit))
        if limit is not None:
            return limit  # version 1 writes "none" as a number larger than any memory
    return None


def _held_bytes(root: Path) -> int:
    """What the container has in use and cannot give back; 0 if that is unknown."""
    for cgroup in _CGROUPS:
        used = _number(r"^(\d+)$", _read_cgroup(root, cgroup.used))
        if used is not None:
            cache = _number(rf"^{cgroup.cache} (\d+)$", _read_cgroup(root, cgroup.stat))
            return used - (cache or 0)
    return 0


def _of_machine(root: Path, field: str, pages: str) -> int:
    value = memory_bytes(_read(root / "proc/meminfo"), field)
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if value is None else value


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text, re.MULTILINE)
    return int(match[1]) if match else None


def _read_cgroup(root: Path, name: str) -> str:
    return _read(root / "sys/fs/cgroup" / name)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
