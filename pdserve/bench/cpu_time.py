"""What a process has computed so far, and how long it was kept from it.

On a busy machine seconds of a core are a better measure of what something costs than time is, and
times of a process that was starved say little about it.
"""

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


def starved_seconds(pid: int) -> float:
    """How long its main thread could have run and had no core; 0 where the kernel does not say.

    Raises:
        ClusterError: there is no such process.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        if Path(f"/proc/{pid}").exists():
            return 0.0
        raise ClusterError(f"there is no process {pid}") from None
