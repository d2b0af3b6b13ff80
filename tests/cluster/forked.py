"""Processes of a cluster that are forked from one that has imported everything already.

Half of what these tests cost was the import of torch, a hundred times over. What a forked process
runs is `pdserve`'s own `main` with its flags, in a session and with output of its own. Where it
matters how Python starts or ends, tests have the supervisor start their processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from pdserve.commands.cli.main import main
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.shared.process.limited_child import die_with_parent

PROFILE_S = 0.2  # of a tiny model
_IMPORTED_BY = os.getpid()  # in a forked process: the fork server, which has imported this
IMPORTED = ["pdserve.commands.cli.node", "coordinator.main", "tests.cluster.forked"]


class ForkedChild(Child):
    """A Child that runs `python -m pdserve ...`, and nothing else."""

    def _open(
        self, argv: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        command, words = tuple(argv[: len(OWN_COMMAND)]), list(argv[len(OWN_COMMAND) :])
        assert command == OWN_COMMAND, command
        assert not pass_fds
        process = ForkedProcess(words, environment, self._prepare(words))
        self._loop.call_soon(process.begin)  # until then it cannot end: somebody has to see it
        return process  # type: ignore[return-value]

    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        """What the forked process calls first, a function of a module; None: nothing."""
        return None


class HastyChild(ForkedChild):
    """For clusters whose config is not the test's: their nodes take little time for a profile."""

    def _open(
        self, argv: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        is_node = argv[len(OWN_COMMAND)] != COORDINATOR
        hasty = [f"--set=profile.profile_s={PROFILE_S}"] if is_node else []
        return super()._open([*argv, *hasty], pass_fds, environment)


class ForkedProcess:
    """What Child asks of a subprocess.Popen."""

    def __init__(
        self,
        words: list[str],
        environment: Mapping[str, str],
        prepare: Callable[[], None] | None,
    ) -> None:
        context = fork_server()
        self.stdout, output = context.Pipe(duplex=False)
        beginning, self._begin = context.Pipe(duplex=False)
        arguments = (words, dict(environment), output, beginning, prepare)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
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
def fork_server() -> ForkServerContext:
    """It runs from the first call on, on the host where that was made, until this process ends."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # gRPC is imported there, and does nothing yet
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return context


def _run(
    words: list[str],
    environment: dict[str, str],
    output: Connection,
    beginning: Connection,
    prepare: Callable[[], None] | None,
) -> None:
    """In the forked process: as if it had been started with these words."""
    beginning.recv_bytes()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    # Among the others is the pipe by which the fork server knows that somebody needs it.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    if prepare is not None:
        prepare()
    die_with_parent(_IMPORTED_BY)
    sys.exit(main([word for word in words if not word.startswith("--die-with-parent=")]))
