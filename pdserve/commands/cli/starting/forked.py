"""Nodes of `pdserve up` are forked from one process that has imported what all of them need.

Importing torch takes longer than mapping a packed model, and two nodes on one machine would do it
at the same time. It begins before anything is checked, and a node that is started again has it,
too. What it has imported is one copy in memory. A forked node is like one that was started: flags,
environment, output, process group and what `ps` shows are its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Final, TypeAlias

from pdserve.commands.cli.main import main
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.settings.access import without_keys
from pdserve.shared.process.exit_codes import StartFailed
from pdserve.shared.process.limited_child import die_with_parent

IMPORTED: Final = ("pdserve.commands.cli.starting.preloaded",)
_IMPORTED_BY: Final = os.getpid()  # in a forked process: the fork server, which has imported this
_ARG_START, _ARG_END = 45, 46  # in /proc/PID/stat, behind the name

# Runs a command in the forked process: words, environment, where to write, what to wait for.
Target: TypeAlias = Callable[[list[str], dict[str, str], Connection, Connection], None]
Makes: TypeAlias = tuple[type[Child], Callable[[], Awaitable[None]] | None]


class ForkedNode(Child):
    """A Child, which is forked if it is a node that takes nothing but words."""

    def _open(
        self, argv: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        command, words = tuple(argv[: len(OWN_COMMAND)]), list(argv[len(OWN_COMMAND) :])
        if command != OWN_COMMAND or words[0] == COORDINATOR or pass_fds:
            return super()._open(argv, pass_fds, environment)
        process = ForkedProcess(words, environment, fork_server())
        self._loop.call_soon(process.begin)  # until then it cannot end: somebody has to see it
        return process  # type: ignore[return-value]


class ForkedProcess:
    """What Child asks of a subprocess.Popen."""

    def __init__(
        self,
        words: list[str],
        environment: Mapping[str, str],
        server: ForkServerContext,
        target: Target | None = None,
    ) -> None:
        """Fork one that runs `python -m pdserve WORDS`, or `target` with these.

        Raises:
            OSError: there is no fork server any more.
        """
        self.stdout, output = server.Pipe(duplex=False)
        beginning, self._begin = server.Pipe(duplex=False)
        arguments = (words, dict(environment), output, beginning)
        self._process = server.Process(target=target or run_forked, args=arguments, daemon=True)
        try:
            self._process.start()
        except EOFError as error:
            raise OSError("the process that nodes are forked from has ended") from error
        output.close()
        beginning.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def begin(self) -> None:
        """Let it run, unless it has been killed already."""
        with suppress(BrokenPipeError), self._begin:
            self._begin.send_bytes(b"b")

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing if it has ended."""
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, or the negative signal that ended it."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code


@cache
def fork_server(imported: tuple[str, ...] = IMPORTED) -> ForkServerContext:
    """It runs from the first call on, on the host where that was made, until this process ends.

    It imports meanwhile, does not hear of Ctrl-C, and knows no secrets.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    own = dict(os.environ)
    os.environ.clear()
    os.environ.update(without_keys(own))
    # gRPC is imported there, and does nothing yet.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ.clear()
        os.environ.update(own)
    return context


def begin_forking(command: Sequence[str]) -> Makes:
    """Return what makes a cluster's processes, and what it waits for before nodes.

    They are forked if `command` is ours, and imports begin now.
    """
    if tuple(command) != OWN_COMMAND:
        return Child, None
    fork_server()
    return ForkedNode, has_imported


async def has_imported() -> None:
    """Wait until the fork server can fork. Raises StartFailed: it cannot."""
    first = fork_server().Process(target=_nothing, daemon=True)
    try:
        await asyncio.to_thread(first.start)
    except (EOFError, OSError) as error:
        raise StartFailed(
            f"the process that nodes are forked from does not start: {error}"
        ) from error


def run_forked(
    words: list[str], environment: dict[str, str], output: Connection, beginning: Connection
) -> None:
    """In the forked process: as if it had been started with these words."""
    become(words, environment, output, beginning)
    run_words(words)


def become(
    words: list[str], environment: dict[str, str], output: Connection, beginning: Connection
) -> None:
    """Be like one started with these words; of the fork server's files none is left open."""
    beginning.recv_bytes()
    gc.enable()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    _show_as([*OWN_COMMAND, *words])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    # Among the others is the pipe by which the fork server knows that somebody needs it.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = sys.stderr = os.fdopen(
        1, "w", buffering=1, errors="backslashreplace", closefd=False
    )


def run_words(words: list[str]) -> None:
    """Run this command, and end with the process that this one was forked from."""
    die_with_parent(_IMPORTED_BY)
    sys.exit(main([word for word in words if not word.startswith("--die-with-parent=")]))


def _nothing() -> None:
    """What is forked to see that it can be."""


def _show_as(argv: Sequence[str]) -> None:
    """Have `ps` show this command line, as far as there is room for it."""
    with open("/proc/self/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    shown = b"\0".join(map(os.fsencode, argv))[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
