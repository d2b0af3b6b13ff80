"""Busy neighbours of a benchmark, and how much longer steps take beside them.

A step beside neighbours must take longer, because they take processor time away. `ratio` compares
it with what that time explains: with two threads on two cores, and neighbours that used half a
core, 2 / (2 - 0.5). What is above 1 was lost in waiting for threads without a core.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from select import POLLIN, poll
from typing import IO, Protocol, Self

import msgspec

from pdserve.commands.bench.cpu_time import cpu_seconds
from pdserve.commands.bench.step.busy_process import BUSY, REST
from pdserve.shared.errors import ClusterError

_ANSWER_S = 10.0  # deadline of an order: a process that has just started imports modules first

_LEAST_LEFT = 0.1  # cores: processor time is counted in clock ticks, so all may seem to be lost


class BesideNeighbours(msgspec.Struct, frozen=True):
    """Steps of one case beside neighbours. Times are medians over rounds of the mean step."""

    alone_ms: float
    beside_ms: float
    lost_cores: float  # that the neighbours used meanwhile
    ratio: float  # beside / alone, over what the lost cores explain


class OtherWork(Protocol):
    """Other work on the cores, which can be switched on."""

    def busy(self) -> AbstractContextManager[Callable[[], float]]:
        """Work while this is entered; yields the processor seconds used so far."""
        ...


class BusyProcesses:
    """Implements OtherWork: processes that each want one core half of the time."""

    def __init__(self, count: int, cores: Sequence[int]) -> None:
        """Prepare for `count` of them, on the last of these cores."""
        self._cores = [cores[-1 - number % len(cores)] for number in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start them; they rest."""
        with self._stack:
            for core in self._cores:
                process = self._stack.enter_context(_start(core))
                self._stack.callback(process.kill)  # before it is waited for
                self._processes.append(process)
            self._order(REST)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes]

    @contextmanager
    def busy(self) -> Iterator[Callable[[], float]]:
        """As OtherWork.busy.

        Raises:
            ClusterError: one of them has ended.
        """
        self._order(BUSY)
        try:
            yield lambda: sum(map(cpu_seconds, self.pids))
        finally:
            self._order(REST)

    def _order(self, order: bytes) -> None:
        """Give an order to all, and wait until they mind it."""
        with suppress(BrokenPipeError):  # one that has ended does not answer, either
            for process in self._processes:
                _pipe(process.stdin).write(order)
        for process in self._processes:
            answers = _pipe(process.stdout)
            waiting = poll()  # select() takes no descriptor above 1023
            waiting.register(answers, POLLIN)
            if not waiting.poll(1000 * _ANSWER_S) or answers.read(1) != order:
                raise ClusterError(f"the benchmark's busy process {process.pid} does not answer")


@dataclass(slots=True)
class Rounds:
    """What is seen of one case, alone and beside neighbours in turns."""

    alone_s: list[float] = field(default_factory=list)  # mean of a step; one per round
    beside_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0  # beside neighbours
    lost_s: float = 0.0  # processor seconds that they used

    def measure(
        self,
        neighbours: OtherWork,
        steps: Callable[[], float],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure beside neighbours; `steps` runs some, and returns the mean time of one."""
        with neighbours.busy() as used_s:
            started_s, before_s = now(), used_s()
            self.beside_s.append(steps())
            self.lost_s += used_s() - before_s
            self.elapsed_s += now() - started_s

    def result(self, num_threads: int, num_cores: int) -> BesideNeighbours:
        """Compare; `num_threads` compute a step, on any of `num_cores`."""
        alone_s, beside_s = statistics.median(self.alone_s), statistics.median(self.beside_s)
        lost_cores = self.lost_s / self.elapsed_s
        left_cores = max(num_cores - lost_cores, _LEAST_LEFT)
        explained = min(num_threads, num_cores) / min(num_threads, left_cores)
        return BesideNeighbours(
            alone_ms=alone_s * 1e3,
            beside_ms=beside_s * 1e3,
            lost_cores=lost_cores,
            ratio=beside_s / alone_s / explained,
        )


def _start(core: int) -> subprocess.Popen[bytes]:
    """In a session of its own, as other services are: Linux shares the cores among sessions."""
    return subprocess.Popen(
        [sys.executable, "-m", "pdserve.commands.bench.step.busy_process", str(core)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "processes are started with pipes"
    return pipe
