"""Processes that are forked by a process without threads: Python and torch take each seconds.

A process with threads must not fork and go on with more than exec: whatever lock another thread
holds at that moment is never released in the child, which then hangs now and then. So there is a
`Forker`, forked before there are threads, or from the fork server of `tests.cluster.forked`. What
it is to run is sent to it, with open files.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from pdserve.engine.ranks.order import RankOrder
from pdserve.shared.process.limited_child import die_with_parent
from tests.cluster.forked import fork_server

_MOST_BYTES = 1 << 20  # of a message
_MOST_FDS = 16
_FREE = 512  # descriptors from here on are nobody's
_CODE = struct.Struct("i")
FORKER = "forker"  # its name, for those who look for processes
_COMM = Path("/proc/self/comm")


class Forker:
    """A process that forks others as it is told; they and it end with who has the other end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def fork(self, run: Callable[[], None], fds: Sequence[int], done: int) -> int:
        """Return the id of a process that calls `run`, and has these files under these numbers.

        Its exit code is written to `done`.
        """
        message = pickle.dumps((run, list(fds)))
        with self._lock:
            socket.send_fds(self._sock, [message], [done, *fds])
            return int(self._sock.recv(32))


_forker: Forker | None = None


def begin_forking() -> None:
    """Fork the forker of this process, which has no threads yet."""
    global _forker
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            ours.close()
            die_with_parent(parent)
            _serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    _forker = Forker(ours)


def forker() -> Forker:
    """The forker of this process; without one so far, it is forked from the fork server."""
    global _forker
    if _forker is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fork_server().Process(target=_serve, args=(theirs,), daemon=True).start()
        theirs.close()
        _forker = Forker(ours)
    return _forker


def _serve(sock: socket.socket) -> None:
    """Fork until the other end is closed; then kill all that run."""
    _COMM.write_text(FORKER)
    running: dict[int, tuple[int, int]] = {}  # descriptor of a process |-> its id, and `done`
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, done = running.pop(fd)
                poll.unregister(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # nobody waits any more
                    os.write(done, _CODE.pack(code))
                os.close(done)
                os.close(fd)
                continue
            message, fds, _, _ = socket.recv_fds(sock, _MOST_BYTES, _MOST_FDS)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            done, *files = fds
            pid = _fork(message, files)
            for file in files:
                os.close(file)
            end = os.pidfd_open(pid)
            running[end] = pid, done
            poll.register(end, select.POLLIN)
            sock.send(str(pid).encode())


def _fork(message: bytes, files: Sequence[int]) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        global _forker
        _forker = None
        _COMM.write_text("python")
        die_with_parent(parent)
        run, numbers = pickle.loads(message)
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, _FREE) for file in files]
        os.closerange(3, _FREE)
        for file, number in zip(above, numbers, strict=True):
            os.dup2(file, number, inheritable=False)
            os.close(file)
        run()
    finally:
        os._exit(1)


class ForkedProcess:
    """A process by itself."""

    def __init__(self, run: Callable[[], None], fds: Sequence[int] = ()) -> None:
        self.sentinel, done = os.pipe()
        self.pid = forker().fork(run, fds, done)
        os.close(done)

    def kill(self) -> None:
        """Nothing if it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, or the negative signal that ended it."""
        code = os.read(self.sentinel, _CODE.size)
        os.close(self.sentinel)
        return _CODE.unpack(code)[0] if code else -signal.SIGKILL  # the forker has ended, too


class ForkedRank(ForkedProcess):
    """Implements pdserve.engine.ranks.processes.RankProcess."""

    def __init__(self, run: Callable[[int], None], fds: Sequence[int]) -> None:
        """`run` is a rank's life; it is given the descriptor to write MAPPED to."""
        self.stdout, write = os.pipe()
        try:
            super().__init__(partial(run, write), [write, *fds])
        finally:
            os.close(write)


def fork_ranks() -> None:
    """From now on this process forks the ranks of its host, and the one that stands for the next.

    For nodes, and further hosts of nodes, that are forked themselves, and have no threads yet.
    """
    from pdserve.engine.ranks.process import run_rank
    from pdserve.node.rank_hosts.carrier import run_carrier
    from pdserve.node.rank_hosts.messages import CarrierOrder
    from pdserve.node.start import ranks

    def forked(module: str, order: RankOrder | CarrierOrder, fds: Sequence[int]) -> ForkedRank:
        is_carrier = isinstance(order, CarrierOrder)
        return ForkedRank(partial(run_carrier if is_carrier else run_rank, order), fds)

    begin_forking()
    ranks.PythonRank = forked
