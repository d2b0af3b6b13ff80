"""The memory through which the nodes of a pair share their cores: it ends with this process."""

from __future__ import annotations

import fcntl
import os

# As large as nodes expect it, whoever maps it: see `pdserve/node/split_cores/pair.py`.
_BYTES = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CoreFiles:
    """One file for each pair; nodes open them by path."""

    def __init__(self, num_pairs: int) -> None:
        """Raises OSError: there are no descriptors left."""
        self._fds: list[int] = []
        for _ in range(num_pairs):
            fd = os.memfd_create("pdserve-cores", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._fds.append(fd)
            os.ftruncate(fd, _BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def paths(self) -> list[str]:
        """Valid in all processes of this user, while this object is open."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def close(self) -> None:
        """Idempotent."""
        while self._fds:
            os.close(self._fds.pop())
