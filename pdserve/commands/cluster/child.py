"""A child process: its output is read line by line, and its end is an event.

The end is observed through a pidfd. So it is noticed when the process itself ends, even if one of
its own children still holds the output open.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pdserve.settings.access import without_keys
from pdserve.shared.process.exit_codes import MEANING

LineSink = Callable[[str, str], None]  # (process name, line without its end)
ExitSink = Callable[["Exit"], None]

_ERROR = re.compile(r"pdserve [a-z]+: error: (.*)")
_KEPT_LINES = 50
_READ_BYTES = 64 * 1024  # longer lines are split


@dataclass(frozen=True)
class Exit:
    """The end of a process."""

    name: str
    pid: int
    returncode: int  # negative: the signal that ended it
    last_line: str  # the error that it reported, or else the last line that it wrote

    @property
    def cause(self) -> str:
        """How it ended: "exit code 2" or "signal SIGKILL"."""
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        try:
            return f"signal {signal.Signals(-self.returncode).name}"
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.returncode}"

    @property
    def account(self) -> str:
        """The cause, what it means and, if the process exited with an error, its last line."""
        meaning = MEANING.get(self.returncode)
        told = f"{self.cause} ({meaning})" if meaning else self.cause
        return f"{told}: {self.last_line}" if self.returncode > 0 and self.last_line else told

    @property
    def told(self) -> str:
        """Who ended, and how."""
        return f"{self.name} (pid {self.pid}) ended with {self.account}"


def reported_error(line: str) -> str:
    """Return the error with which a command of ours ended, if this line says it; else nothing."""
    return found[1] if (found := _ERROR.match(line)) else ""


class Process(ABC):
    """A process of a cluster, running or ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._end: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process id, also after its end."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""

    @property
    def is_running(self) -> bool:
        """Whether its end has not been observed yet."""
        return not self._end.done()

    async def ended(self) -> Exit:
        """Wait for its end; any number of tasks may wait."""
        return await asyncio.shield(self._end)

    async def stop(self, grace_s: float) -> Exit:
        """Send SIGTERM, and SIGKILL after `grace_s`; returns when the process has ended."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.ended()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self.ended()


class Child(Process):
    """A child process in a process group of its own.

    So Ctrl-C in the terminal reaches only the parent, which then stops its children in order.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        on_line: LineSink,
        on_exit: ExitSink,
        pass_fds: Sequence[int] = (),
        *,
        keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start `argv`. Every line of output is passed to `on_line`, and the end to `on_exit`.

        The child inherits the descriptors `pass_fds` under the same numbers,
        and the environment: without secrets, but for those of `keys`.

        Raises:
            OSError: the program cannot be started.
        """
        super().__init__(name)
        self._on_line = on_line
        self._on_exit = on_exit
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._unfinished = b""  # the line being written
        self._loop = asyncio.get_running_loop()
        self._process = self._open(argv, pass_fds, without_keys(os.environ) | dict(keys))
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._loop.add_reader(self._output, self._read)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._finish)

    @property
    def pid(self) -> int:
        """Its process id, also after its end."""
        return self._process.pid

    def _open(
        self, argv: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the program; both its outputs are its `stdout`.

        It has a process group of its own, so a terminal's Ctrl-C is for us alone; but our session.
        Linux shares cores among sessions first (autogroups, `man 7 sched`): in one of its own, the
        event loop of a node that computes all the time would wait as long as what computes.
        """
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            process_group=0,
            pass_fds=pass_fds,
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended."""
        self._process.send_signal(number)

    def _read(self) -> bool:
        """Read available output once; whether there may be more."""
        try:
            piece = os.read(self._output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, rest = (self._unfinished + piece).split(b"\n")
        if rest and (not piece or len(rest) >= _READ_BYTES):
            lines, rest = [*lines, rest], b""
        self._unfinished = rest
        for line in lines:
            self._pass_on(line.decode(errors="replace").rstrip())
        if not piece:
            self._loop.remove_reader(self._output)
        return bool(piece)

    def _pass_on(self, line: str) -> None:
        if line:
            self._lines.append(line)
        self._on_line(self.name, line)

    def _finish(self) -> None:
        """The process has ended; the rest of its output is in the pipe."""
        while self._read():
            pass
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._output.close()
        end = Exit(self.name, self.pid, self._process.wait(), self._last_line())
        self._end.set_result(end)
        self._on_exit(end)

    def _last_line(self) -> str:
        errors = [error for line in self._lines if (error := reported_error(line))]
        return (errors or list(self._lines) or [""])[-1]
