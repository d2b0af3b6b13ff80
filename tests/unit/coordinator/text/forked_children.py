"""Limited processes that are forked from one which has imported what they need.

A test that has a grammar checked or a template rendered in a process of its own would wait for
Python to start, which is most of its time. What runs is the same module, with its own limits.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import socket
import subprocess
import sys
from functools import cache

from coordinator.text.limited_process import LimitedProcess
from tests.architecture.repository import ROOT

_IMPORTED = "pdserve.grammar", "coordinator.templates.child"
_SERVE = "from tests.unit.coordinator.text.forked_children import serve; serve()"


def serve() -> None:
    """Fork for each module that is asked for, with the two descriptors that come with its name."""
    children: list[int] = []
    for name in _IMPORTED:
        __import__(name)
    asked = socket.socket(fileno=os.dup(0))
    while True:
        name, descriptors, *_ = socket.recv_fds(asked, 256, 2)
        if not name:
            return
        if pid := os.fork():
            asked.send(str(pid).encode())
            children = [*filter(_is_running, children), pid]
        else:
            asked.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            runpy.run_module(name.decode(), run_name="__main__", alter_sys=True)
            sys.stdout.flush()
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _is_running(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG) == (0, 0)


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """It runs from the first call on, until `end_server`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return ours, subprocess.Popen(
            [sys.executable, "-c", _SERVE], cwd=ROOT, stdin=theirs.fileno()
        )


def end_server() -> None:
    """If it runs."""
    if _server.cache_info().currsize:
        asked, process = _server()
        asked.close()
        process.wait()
        _server.cache_clear()


class _Forked:
    """What LimitedProcess asks of asyncio's Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter
        self.stdout: asyncio.StreamReader
        self._reading: asyncio.BaseTransport
        self._over = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)  # readable once it has ended
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    async def connect(self, given: int, taken: int, max_line_bytes: int) -> None:
        """By these pipes to its stdin and from its stdout."""
        loop = asyncio.get_running_loop()
        self.stdout = asyncio.StreamReader(max_line_bytes)
        self._reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self.stdout), os.fdopen(taken, "rb")
        )
        writing, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(given, "wb")
        )
        self.stdin = asyncio.StreamWriter(writing, protocol, None, loop)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        await self._over.wait()
        self._reading.close()
        await asyncio.sleep(0)  # for transports to tell that they are closed

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = 0  # nobody asks which
        self._over.set()


class ForkedLimitedProcess(LimitedProcess):
    """One that need not import anything."""

    async def start(self) -> None:
        await self.end()
        (stdin, given), (taken, stdout) = os.pipe(), os.pipe()
        asked, _ = _server()
        socket.send_fds(asked, [self._module.encode()], [stdin, stdout])
        process = _Forked(int(asked.recv(32)))
        os.close(stdin)
        os.close(stdout)
        await process.connect(given, taken, self._max_line_bytes)
        self._process = process  # type: ignore[assignment]
