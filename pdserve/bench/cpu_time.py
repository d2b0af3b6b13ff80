"""What a process has computed so far, in seconds of a core; on a busy machine a better measure
of its cost than time."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.errors import ClusterError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # behind the name, which may have blanks in it


def cpu_seconds(pid: int) -> float:
    """Of all its threads, those that have ended included; in the kernel, too.

    Raises:
        ClusterError: there is no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise ClusterError(f"there is no process {pid}: {error.strerror}") from error
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
