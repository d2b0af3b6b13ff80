"""Processes of a cluster that are forked from one that has imported everything already.

Half of what these tests cost was the import of torch, a hundred times over. What a forked process
runs is `pdserve`'s own `main` with its flags, in a session and with output of its own. Where it
matters how Python starts or ends, tests have the supervisor start their processes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from pdserve.commands.cli.starting import forked
from pdserve.commands.cli.starting.forked import ForkedProcess, become, run_words
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.supervisor import OWN_COMMAND

PROFILE_S = 0.2  # of a tiny model
IMPORTED = (*forked.IMPORTED, "coordinator.main", "tests.cluster.forked")


class ForkedChild(Child):
    """A Child that runs `python -m pdserve ...`, and nothing else."""

    def _open(
        self, argv: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        command, words = tuple(argv[: len(OWN_COMMAND)]), list(argv[len(OWN_COMMAND) :])
        assert command == OWN_COMMAND, command
        assert not pass_fds
        prepare = self._prepare(words)
        target = None if prepare is None else partial(_run_prepared, prepare)
        process = ForkedProcess(words, environment, fork_server(), target)
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


def fork_server() -> ForkServerContext:
    """It runs from the first call on, on the host where that was made, until this process ends."""
    return forked.fork_server(IMPORTED)


def _run_prepared(
    prepare: Callable[[], None],
    words: list[str],
    environment: dict[str, str],
    output: Connection,
    beginning: Connection,
) -> None:
    """As `run_forked`, with what a test has to do there, whose files stay open."""
    become(words, environment, output, beginning)
    prepare()
    run_words(words)
