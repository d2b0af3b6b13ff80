"""Reads /proc/meminfo. No torch here."""

from __future__ import annotations

import os
import re
from pathlib import Path


def memory_bytes(meminfo: str, field: str) -> int | None:
    """One field in the text of /proc/meminfo, in bytes; None if it is missing."""
    match = re.search(rf"^{field}:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that processes can still allocate: free memory and reclaimable page cache.

    After a start or two, most memory that is not free is page cache: the weights.
    """
    available = memory_bytes(meminfo.read_text(), "MemAvailable") if meminfo.exists() else None
    if available is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available
