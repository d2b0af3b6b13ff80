"""Two nodes of a host that may both use all of its cores, and what they tell each other.

They share a page of memory, which `pdserve up` makes. In its first words each says how many cores
it asks for while it computes (`csrc/core_split.h`), and the kernels of both follow that from one
item of a job to the next. There are no messages, and nobody waits. A node also holds a lock on a
byte of it, which the system releases with its process: so the cores of a node that has died are
free at once, while those of one that stands still are for the other one after `LEASE_S`.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from pdserve import _native
from pdserve.engine.native.file_lock import file_lock
from pdserve.errors import ConfigError
from pdserve.protocol import NodeRole

LEASE_S: Final = 0.5  # for which a node that stands still keeps its cores
TURN_S: Final = 60.0  # longest wait until the other node is profiled
_BYTES: Final = {NodeRole.PREFILL: 0, NodeRole.DECODE: 1}  # which one a node locks
_FLOCK: Final = "hhqqi4x"  # type, whence, start, length, pid


class CorePair:
    """One node's side of the pair."""

    def __init__(self, path: str, role: NodeRole, num_cores: int, lease_s: float = LEASE_S) -> None:
        """Open the memory at `path`.

        Raises:
            ConfigError: it cannot be used for this, or a node of this role uses it.
        """
        self.num_cores = num_cores
        self.takes_rest = role is NodeRole.PREFILL  # of what the other node asks for
        self.step_cores = 0.0  # that the kernels of the last step had, on average
        self._path = Path(path)
        self._other = role.other
        self._fd = _open(path)
        try:
            if not self._lock(_BYTES[role]):
                name = role.name.lower()
                raise ConfigError(f"shared_cores {path}: another {name} node uses it already")
            self._split = self._mapped(lease_s)
            self._split.release()  # what a former node has left
        except BaseException:
            os.close(self._fd)
            raise

    def _mapped(self, lease_s: float) -> _native.CoreSplit:
        """Map the memory, opened once more: a mapping would keep the lock as long as it lasts."""
        fd = _open(str(self._path))
        try:
            return _native.CoreSplit(fd, self.takes_rest, self.num_cores, lease_s)
        finally:
            os.close(fd)

    @property
    def allowed(self) -> int:
        """Cores that this node may use at the moment."""
        return self._split.allowed

    def ask(self, num_cores: int) -> None:
        """A step begins, for which so many cores are wanted while the other node computes too."""
        if self._split.asked_by_other and self._is_free(_BYTES[self._other]):
            self._split.clear_other()  # its process has ended
        self._split.ask(num_cores)

    def step_ended(self) -> float:
        """Return how many cores the kernels of the step had, on average; 0: it needed none."""
        self.step_cores = self._split.mean_cores
        return self.step_cores

    def release(self) -> None:
        """There is nothing to compute: the other node may have all cores."""
        self._split.release()

    @contextmanager
    def in_kernels(self) -> Iterator[None]:
        """Have all kernel calls use the cores that this node may use."""
        _native.set_core_split(self._split)
        try:
            yield
        finally:
            _native.set_core_split(None)
            self._split.release()

    def turn(self, check: Callable[[], None]) -> AbstractContextManager[bool]:
        """A context in which the other node is not being profiled, unless that takes too long.

        `check` is called while it is waited for, and may raise.
        """
        return file_lock(self._path, TURN_S, check)

    def close(self) -> None:
        """Leave the pair, whatever is still computed. Idempotent."""
        if self._fd >= 0:
            self._split.release()
            del self._split  # now: who is still referred to by cycles has it at the process's end
            os.close(self._fd)  # and the lock with it
            self._fd = -1

    def _lock(self, byte: int) -> bool:
        """Lock a byte, unless another process has; whether this node has it now."""
        try:
            self._command(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_free(self, byte: int) -> bool:
        found = self._command(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte)
        return bool(struct.unpack(_FLOCK, found)[0] == fcntl.F_UNLCK)

    def _command(self, command: int, kind: int, byte: int) -> bytes:
        return fcntl.fcntl(self._fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))


def _open(path: str) -> int:
    """Open the memory, which nobody can cut: an access beyond its end would end the process.

    Raises:
        ConfigError: it cannot be opened, or is something else.
    """
    size = _native.CORE_SPLIT_BYTES
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"shared_cores {path}: {error.strerror}") from error
    found = os.fstat(fd).st_size
    if found != size or not _keeps_its_size(fd):
        os.close(fd)
        raise ConfigError(
            f"shared_cores {path}: expected memory of {size} bytes that is sealed against "
            f"shrinking (memfd_create), as `pdserve up --mode multiplexed` makes it; this has "
            f"{found} bytes{' and can shrink' if found == size else ''}"
        )
    return fd


def _keeps_its_size(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file on a disk has no seals
        return False
