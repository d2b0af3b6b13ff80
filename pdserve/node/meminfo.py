"""What /proc/meminfo says. No torch here."""

from __future__ import annotations

import os
import re
from pathlib import Path


def memory_bytes(meminfo: str, field: str) -> int | None:
    """One field of the text of /proc/meminfo."""
    match = re.search(rf"^{field}:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What processes may still take: free memory, and what the page cache would give back.

    After a start or two, most of what is not free is weights that the page cache keeps.
    """
    available = memory_bytes(meminfo.read_text(), "MemAvailable") if meminfo.exists() else None
    if available is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available
