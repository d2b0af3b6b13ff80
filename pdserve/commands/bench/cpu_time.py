"""CPU time that a process has used, and time that it waited for a core.

On a busy machine CPU seconds are a better measure of cost than elapsed time, and latencies of a
starved process say little about it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from pdserve.shared.errors import ClusterError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # fields after the name, which may contain blanks


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, including ended ones and kernel time.

    Raises:
        ClusterError: there is no such process.
    """
    try:
        return _ticks_s(Path(f"/proc/{pid}/stat"))
    except OSError as error:
        raise ClusterError(f"there is no process {pid}: {error.strerror}") from error


def starved_seconds(pid: int) -> float:
    """Return how long the main thread waited for a core; 0 if the kernel does not count it.

    Raises:
        ClusterError: there is no such process.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        if Path(f"/proc/{pid}").exists():
            return 0.0
        raise ClusterError(f"there is no process {pid}") from None


def busy_seconds(cores: Collection[int], stat: Path = Path("/proc/stat")) -> float:
    """Return the CPU seconds of everybody on these cores since the system was started.

    What a hypervisor has given to others is among them.
    """
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *counts = line.split()
        if name in wanted:
            user, nice, system, _idle, _waiting, interrupts, soft, *rest = map(int, counts)
            ticks += user + nice + system + interrupts + soft + sum(rest[:1])
    return ticks / _TICKS_PER_S


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a process's present threads, by their names in the system.

    Raises:
        ClusterError: there is no such process.
    """
    found: dict[str, float] = defaultdict(float)
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError as error:
        raise ClusterError(f"there is no process {pid}: {error.strerror}") from error
    for thread in threads:
        with suppress(OSError):  # it has just ended
            found[(thread / "comm").read_text().strip()] += _thread_s(thread)
    return dict(found)


def _thread_s(thread: Path) -> float:
    """Return its seconds to the nanosecond, or in ticks where the kernel does not count these."""
    with suppress(FileNotFoundError):
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    return _ticks_s(thread / "stat")


def _ticks_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
