"""The processor's name, for people and as a key of cached profiles."""

from __future__ import annotations

import re


def processor_name(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo."""
    match = re.search(r"^(?:model name|Processor|CPU part)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else "unknown"
